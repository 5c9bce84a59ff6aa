"""`python -m sd_scripts.schema docs` writes what of docs is made; `... cluster --run FILE --save_to DIR` the files of a cluster run."""

import sys
from pathlib import Path

from sd_scripts.runs import cluster

from . import command_line, flat, toml_files
from .docs import event_schema, page
from .errors import OptionError
from .files import write_atomically

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {DOCS / "options.md": page, DOCS / "events.schema.json": event_schema}
USAGE = """usage: python -m sd_scripts.schema docs
       python -m sd_scripts.schema cluster --run FILE --save_to DIR [--kind slurm|torchrun|kubernetes] [--option value ...]
       python -m sd_scripts.schema cluster --check JOB.YAML
"""


def main(arguments: list[str]) -> int:
    """Exit code of the command: 0 done, 1 something is left to do in a checked file, 2 wrong options."""
    if arguments == ["docs"]:
        for path, made in PAGES.items():
            write_atomically(path, made())
        return 0
    if arguments[:1] != ["cluster"]:
        sys.stderr.write(USAGE)
        return 2
    try:
        if arguments[1:2] == ["--check"] and len(arguments) == 3:
            return _check(Path(arguments[2]))
        return _export(command_line.parse_tool(cluster.ClusterOptions, arguments[1:]))
    except OptionError as err:
        command_line.fail(err, cluster.ClusterOptions.script)


def _check(path: Path) -> int:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise OptionError(f"{path} cannot be read: {err}") from err
    problems = cluster.manifest_problems(text)
    sys.stdout.write("".join(f"{path}: {problem}\n" for problem in problems) or f"{path}: nothing is missing\n")
    return 1 if problems else 0


def _export(options: cluster.ClusterOptions) -> int:
    export = options.export
    if not export.run or not export.save_to:
        raise OptionError("--run FILE (the run, as Save TOML writes it) and --save_to DIR (a folder for the files) are both needed")
    values = toml_files.read_toml(Path(export.run))
    run = flat.build(flat.run_of(values), values, origin=Path(export.run).name)
    folder = Path(export.save_to)
    for name, text in cluster.files(run, options.cluster).items():
        try:
            write_atomically(folder / name, text)
        except OSError as err:
            raise OptionError(f"save_to: {folder / name} cannot be written: {err.strerror or err}") from err
        sys.stdout.write(f"{folder / name}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
