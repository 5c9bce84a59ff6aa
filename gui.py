"""Start the studio: a page in the browser that trains diffusion models. `python gui.py --help` lists the options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXPORT = "`gui.py export-space DIR --lora FILE` writes a folder that is a Space with this page's Inference tab; --help after it says more."
LOCAL = ("127.0.0.1", "localhost", "::1")


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="gui.py", description=__doc__, epilog=EXPORT, allow_abbrev=False)
    parse.add_argument("--listen", nargs="?", const="0.0.0.0", default="127.0.0.1", metavar="ADDRESS",
                       help="address to listen on (default: this computer only; without an ADDRESS: all of them)")  # fmt: skip
    parse.add_argument("--server_port", type=int, metavar="PORT", help="port (default: the first free one from 7860)")
    parse.add_argument("--share", action="store_true", help="make a public link through gradio.live; needs --auth")
    parse.add_argument("--auth", metavar="USER:PASSWORD", help="ask for this name and password")
    parse.add_argument(
        "--no_auth", action="store_true", help="listen or share without a password: whoever reaches the page can use this computer"
    )
    parse.add_argument("--inference_only", action="store_true", help="show the Inference tab and nothing else")
    parse.add_argument("--output_dir", type=_given, default=Path("output"), metavar="FOLDER", help="folder of all runs (default: output)")
    parse.add_argument("--allowed_dir", type=_given, action="append", default=[], metavar="FOLDER",
                       help="a folder the page may use besides --output_dir, may be given several times; without it, a page that only "
                       "this computer can open may use every folder, any other one only --output_dir")  # fmt: skip
    parse.add_argument("--allowed_host", action="append", default=[], metavar="NAME",
                       help="a host name under which the page may be opened (behind a proxy, say); may be given several times")  # fmt: skip
    parse.add_argument("--trust_proxy", action="store_true",
                       help="believe what a proxy in front says of who asks (X-Forwarded-For, -Host, -Proto)")  # fmt: skip
    return parse


def _given(text: str) -> Path | None:
    """An empty path is none, never the present folder."""
    return Path(text) if text.strip() else None


def problems(arguments: argparse.Namespace) -> list[str]:
    """Sentences for everything that is wrong with the arguments."""
    found = []
    is_open = arguments.share or arguments.listen not in LOCAL
    if is_open and not arguments.auth and not arguments.no_auth:
        how = "--share" if arguments.share else f"--listen {arguments.listen}"
        found.append(
            f"{how} lets others open the page, and whoever opens it can use this computer: "
            "add --auth user:password (or --no_auth, if that is what you want)"
        )
    if arguments.auth is not None:
        name, colon, password = arguments.auth.partition(":")
        if not (name and colon and password):
            found.append("--auth needs a name and a password with a colon between them, such as --auth ada:correct-horse")
        elif arguments.no_auth:
            found.append("--auth asks for a password and --no_auth asks for none; give one of the two")
    if arguments.server_port is not None and not 1 <= arguments.server_port <= 65535:
        found.append(f"--server_port: {arguments.server_port} is not a port; 1 to 65535 is allowed")
    if arguments.output_dir.exists() and not arguments.output_dir.is_dir():
        found.append(f"--output_dir: {arguments.output_dir} is a file; give a folder")
    found += [f"--allowed_dir: {folder} is not a folder" for folder in arguments.allowed_dir if not folder.is_dir()]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the studio and waits until it is ended; 2 for wrong arguments, 1 when it cannot start."""
    argv = sys.argv[1:] if argv is None else argv
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    if argv and argv[0] == "export-space":
        from kohya_like import exporting

        return exporting.main(argv[1:])
    arguments = parser().parse_args(argv)
    arguments.output_dir = arguments.output_dir or Path("output")
    arguments.allowed_dir = [folder for folder in arguments.allowed_dir if folder is not None]
    wrong = problems(arguments)
    if wrong:
        sys.stderr.write("gui.py: the studio was not started:\n" + "".join(f"  - {sentence}\n" for sentence in wrong))
        return 2
    from kohya_like import ports

    if sentence := ports.problem(arguments.listen, arguments.server_port):
        sys.stderr.write(f"gui.py: the studio was not started:\n  - {sentence}\n")
        return 1
    # Heavy, and only now: a wrong argument is answered at once.
    from kohya_like import startup
    from sd_scripts.runs.importing import uncollected

    startup.prepare()
    with uncollected("gradio"):
        from kohya_like import app

    name, _, password = (arguments.auth or "").partition(":")
    server = app.Server(
        host=arguments.listen,
        port=arguments.server_port,
        share=arguments.share,
        auth=(name, password) if arguments.auth else None,
        allowed_hosts=tuple(arguments.allowed_host),
        trust_proxy=arguments.trust_proxy,
    )
    try:
        context = app.make_context(arguments.output_dir, arguments.allowed_dir, server.is_private)
        demo, local, public = app.launch(context, server, inference_only=arguments.inference_only)
    except (OSError, RuntimeError, ValueError) as err:
        sys.stderr.write(f"gui.py: the studio cannot start: {err}\n")
        return 1
    sys.stdout.write(f"The studio is at {local}\nRuns are kept in {context.output_dir}\n" + (f"Public link: {public}\n" if public else ""))
    sys.stdout.flush()
    app.wait(demo, context)
    return 0


if __name__ == "__main__":
    sys.exit(main())
