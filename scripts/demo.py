"""The main job, seen: one cut for a client of the SDK alone, and for one with the layer.

    ./scripts/demo                            # sets up what it needs, then runs this
    ./scripts/demo --story                    # the checks behind it, told step by step
    ./scripts/demo --picture docs/demo.svg    # and draws what it showed
    python scripts/demo.py                    # in an environment that has it all

On a terminal it shows two panes. On a pipe, in a narrow terminal and with ``NO_COLOR`` it prints
lines. Meanwhile a longer story is played, and the last line counts the checks made of it. If one
failed, or the client with the layer missed something, the exit status is 1.
"""

import argparse
import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from demo_checks import ROOT, Story
from demo_picture import Recorder
from demo_screen import LEAST, Pane, Screen
from demo_stage import line
from demo_story import report, tell
from rich.console import Console
from rich.live import Live


def main() -> int:
    parser = argparse.ArgumentParser(description="Cut a connection, resume its session.")
    parser.add_argument(
        "target",
        nargs="?",
        default=str(ROOT / "examples" / "notes_server.py"),
        help="the server of the story",
    )
    parser.add_argument("--story", action="store_true", help="tell the story behind the demo")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw what it showed")
    arguments = parser.parse_args()
    # What clients and servers log is for a program. The panes show what comes of it.
    logging.getLogger().addHandler(logging.NullHandler())
    console = Console(soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="mcp-sessions-demo-") as name:
        directory = Path(name)
        if arguments.story:
            story = asyncio.run(tell(console, target=arguments.target, directory=directory))
            return 0 if report(story, console, only_failed=False) else 1
        has_all, story, recorder = asyncio.run(show(console, directory, target=arguments.target))
    if arguments.picture is not None:
        arguments.picture.write_text(recorder.svg(), "utf-8")
    passed = report(story, console, only_failed=True)
    return 0 if has_all and passed else 1


async def show(console: Console, directory: Path, *, target: str) -> tuple[bool, Story, Recorder]:
    """Show the panes, and play the story behind them. Whether the right client has it all."""
    panes = (
        Pane("the SDK alone", "Client(url)"),
        Pane("with mcp-sessions", "Client(resumable(url))"),
    )
    has_room = fits(console)
    screen = Screen(panes, None if has_room else console)
    recorder = Recorder(screen)
    can_start = asyncio.Event()
    behind = directory / "story"
    behind.mkdir()

    async def story_behind() -> Story:
        await can_start.wait()
        return await tell(Console(quiet=True), target=target, directory=behind)

    telling = asyncio.create_task(story_behind())
    has_all = False
    with live(screen, console) if has_room else quiet():
        try:
            # The SDK takes a second to load.
            sides = await asyncio.to_thread(import_module, "demo_sides")
            _, has_all = await sides.play(screen, recorder, directory, can_start.set)
        except Exception as error:
            screen.announce(f"The demo broke off: {type(error).__name__} {error}", "bad")
        can_start.set()
    if has_room and not telling.done():
        line(console, "The checks of a longer story still run ...")
    return has_all, await telling, recorder


def fits(console: Console) -> bool:
    """Whether both panes can be shown here."""
    return (
        console.is_terminal
        and not console.is_dumb_terminal
        and not os.environ.get("NO_COLOR")
        and console.width >= LEAST
        and console.encoding.startswith("utf")
    )


@contextmanager
def live(screen: Screen, console: Console) -> Generator[None]:
    with Live(screen, console=console, refresh_per_second=12):
        yield


@contextmanager
def quiet() -> Generator[None]:
    yield


if __name__ == "__main__":
    sys.exit(main())
