"""What a server may have carried to and fro, by a client of ours."""

import httpx2

from mcp_sessions.http_client.session import BoundedJar, HttpSession


async def kept(*answers: list[str], path: str = "/mcp") -> list[str]:
    """The cookies of a last request, after answers that set those."""
    left = list(answers)
    sent: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(request.headers.get("cookie", ""))
        headers = [("set-cookie", each) for each in (left.pop(0) if left else [])]
        return httpx2.Response(200, headers=headers)

    transport = httpx2.MockTransport(answer)
    async with httpx2.AsyncClient(cookies=BoundedJar(), transport=transport) as client:
        for _ in range(len(answers) + 1):
            await client.get("http://host.example" + path)
    return [each for each in sent[-1].split("; ") if each]


async def test_what_leads_to_a_server_is_kept_and_replaced() -> None:
    assert await kept(["route=a"], ["route=b; path=/"]) == ["route=b"]
    assert await kept(["route=a; path=/"], ["route=b; path=/; max-age=0"]) == []


async def test_no_more_than_fifty_and_none_that_is_large() -> None:
    many = [f"c{number}=x; path=/" for number in range(80)]
    assert len(await kept(many, many)) == 50
    assert await kept(["large=" + "x" * 5_000, "small=1"]) == ["small=1"]


async def test_one_that_is_kept_is_replaced_where_there_is_no_room_for_another() -> None:
    full = [f"c{number}=x; path=/" for number in range(50)]
    assert "c7=new" in await kept(full, ["c7=new; path=/", "another=1; path=/"])


async def test_what_has_ended_makes_room() -> None:
    full = [f"c{number}=x; path=/" for number in range(50)]
    ended = [f"c{number}=x; path=/; max-age=0" for number in range(50)]
    assert await kept(full, ended, ["another=1; path=/"]) == ["another=1"]


async def test_all_of_them_fit_into_the_header_of_a_request() -> None:
    """Fifty of 3.5 KB each would be answered with 431."""
    large = [f"c{number}={'x' * 3_500}; path=/" for number in range(50)]
    small = [f"s{number}={'y' * 90}; path=/" for number in range(50)]
    sent = await kept(["route=a; path=/"], large, small, large)
    assert sent[0] == "route=a" and len("; ".join(sent)) <= 6_144
    assert len(sent) > 20


async def test_one_that_is_set_again_and_has_no_room_is_gone() -> None:
    """What it said before does not hold."""
    first = [f"c{number}={'x' * 1_500}; path=/" for number in range(4)]
    assert len(await kept(first, [f"c0={'y' * 3_000}; path=/"])) == 3
    assert len(await kept(first, [f"c0={'y' * 5_000}; path=/"])) == 3
    assert "c0=new" in await kept(first, ["c0=new; path=/"])


async def test_a_cookie_that_is_given_goes_with_those_that_are_kept() -> None:
    """The one that was given went alone, and to a server that redirects not at all."""
    sent: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(request.headers.get("cookie", ""))
        if request.url.path == "/mcp":
            return httpx2.Response(307, headers={"location": "/mcp/"})
        return httpx2.Response(200, headers={"set-cookie": "route=b; path=/"})

    transport = httpx2.MockTransport(answer)
    async with httpx2.AsyncClient(cookies=BoundedJar(), transport=transport) as client:
        session = HttpSession("http://host.example/mcp", client)
        for _ in range(2):
            response = await session.open(
                "GET", None, always={"Cookie": "key=a"}, headers={}, version=None, auth=None
            )
            await response.aclose()
    assert sent == ["key=a", "key=a", "key=a; route=b", "key=a; route=b"]
