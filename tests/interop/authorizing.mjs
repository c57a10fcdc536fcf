// How a stock TypeScript client with its own OAuth provider comes to a token, and gets a new one:
// it registers, its user consents in a browser, and it calls until its first token is refreshed.
// What it saw is one line on stdout. It stays connected until its stdin ends.

const REDIRECT = "http://127.0.0.1:1/callback";
const WITHIN = 30_000;

class Provider {
  constructor(user) {
    this.user = user;
    this.saved = 0;
  }
  get redirectUrl() {
    return REDIRECT;
  }
  get clientMetadata() {
    return {
      client_name: "typescript",
      redirect_uris: [REDIRECT],
      grant_types: ["authorization_code", "refresh_token"],
      response_types: ["code"],
      token_endpoint_auth_method: "client_secret_post",
    };
  }
  clientInformation() {
    return this.registered;
  }
  saveClientInformation(registered) {
    this.registered = registered;
  }
  tokens() {
    return this.issued;
  }
  saveTokens(issued) {
    this.issued = issued;
    this.saved += 1;
  }
  saveCodeVerifier(verifier) {
    this.verifier = verifier;
  }
  codeVerifier() {
    return this.verifier;
  }
  async redirectToAuthorization(url) {
    const page = await fetch(url, { redirect: "manual", headers: { cookie: `user=${this.user}` } });
    this.code = new URL(page.headers.get("location")).searchParams.get("code");
  }
}

export async function authorize(url, user, makeClient, makeTransport) {
  const provider = new Provider(user);
  let client = makeClient();
  let transport = makeTransport(new URL(url), { authProvider: provider });
  try {
    await client.connect(transport);
    throw new Error("it is connected without a token");
  } catch (error) {
    if (!provider.code) throw error;
  }
  await transport.finishAuth(provider.code);
  await client.close();
  client = makeClient();
  transport = makeTransport(new URL(url), { authProvider: provider });
  await client.connect(transport);
  const seen = { session: transport.sessionId ?? null, first: provider.issued.access_token };
  seen.tools = (await client.listTools()).tools.length;
  const end = Date.now() + WITHIN;
  do {
    if (Date.now() > end) throw new Error("the token was not refreshed");
    const { content } = await client.callTool({ name: "get-sum", arguments: { a: 1, b: 2 } });
    seen.sum = content[0].text;
  } while (provider.saved < 2);
  const { content } = await client.callTool({ name: "echo", arguments: { message: "still here" } });
  seen.echo = content[0].text;
  seen.token = provider.issued.access_token;
  seen.sessionAfter = transport.sessionId ?? null;
  console.log(JSON.stringify(seen));
  for await (const _ of process.stdin);
  const again = await client.callTool({ name: "echo", arguments: { message: "and now" } });
  console.log(JSON.stringify({ echo: again.content[0].text }));
  await client.close();
  process.exit(0);
}
