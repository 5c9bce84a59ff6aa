"""How long `--help` and a wrong option take, from starting Python to its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from report import best_seconds, report

SCRIPT = Path(__file__).resolve().parents[2] / "sd_scripts" / "sdxl_train_network.py"


def call(*arguments: str) -> None:
    """Runs the script and drops what it prints."""
    subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, check=False)


if __name__ == "__main__":
    report(
        "command_line",
        "help and refusal under 0.5 s each",
        help_seconds=best_seconds(lambda: call("--help")),
        refusal_seconds=best_seconds(lambda: call("--pretrained_model_name_or_path", "toy", "--network_dmi", "3", "--learning_rate", "-1")),
        python_alone_seconds=best_seconds(lambda: subprocess.run([sys.executable, "-c", "pass"], check=True)),
    )
