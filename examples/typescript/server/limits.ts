/** Every number that the server chooses. Times in seconds, sizes in bytes. */

const given = (name: string, otherwise: number): number => {
  const value = process.env[name];
  return value === undefined ? otherwise : Number(value);
};

export const LIMITS = {
  windowEvents: given("WINDOW_EVENTS", 100),
  windowBytes: given("WINDOW_BYTES", 65_536),
  windowAge: given("WINDOW_AGE", 3600),
  idle: given("IDLE", 1800), // SES13
  lifetime: given("LIFETIME", 7 * 86_400), // SES15
  keyLifetime: given("KEY_LIFETIME", 3600), // KEY12
  keyBytes: 16_384,
  messageBytes: 4 * 1024 * 1024, // WSS5
  bufferBytes: 1024 * 1024, // ATT7
  slow: given("SLOW", 10), // ATT7
  sessions: given("MAX_SESSIONS", 10_000), // ERR6
  subscriptions: 50,
  uriBytes: 2048,
  responseStreams: 16, // HTL10
  responseStreamBytes: 4 * 1024 * 1024,
  unheardRequests: 64, // REQ8, of one principal
  unheardSeconds: given("UNHEARD", 600),
  silentSeconds: 30, // WSS16
  drainSeconds: given("DRAIN", 5), // HTP6
  sealedSeconds: 3600, // SLS2
};

/** Nothing is remembered (SLS1 to SLS5). */
export const IS_STATELESS = process.env["STATELESS"] !== undefined;
