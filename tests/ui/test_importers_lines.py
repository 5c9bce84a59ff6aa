"""Command lines out of scripts and pasted text: the words are those that the shell itself gives a program, and nothing is ever run."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kohya_like import importers
from sd_scripts.families import RUNS
from sd_scripts.programs import command_lines
from sd_scripts.programs.command_lines import Command, commands, options_of
from sd_scripts.schema import command_line, flat, kohya_lines
from sd_scripts.schema.errors import OptionError

_SCRIPT = r"""#!/bin/bash
# a comment with --option and 'a quote
set -e
export BASE="/models/my base" ; LR=1e-4
unused='single $LR "kept"'
NAME="run \"${LR}\" \$5"
args=(
  --network_dim 8   # a rank
  --output_name "$NAME"
  '--training_comment' "two  blanks"
)
args+=(--seed "$((40 + 2))")
extra="--optimizer_args weight_decay=0.1 betas=0.9,0.99"
if true; then
  accelerate launch --num_cpu_threads_per_process=1 --mixed_precision bf16 \
    "sd-scripts/sdxl_train_network.py" \
    --pretrained_model_name_or_path="${BASE}/sdxl.safetensors" --learning_rate ${LR:-5} --max_train_steps="${STEPS:-900}" \
    --caption_extension .txt "${args[@]}" $extra --network_module=networks.lora --empty "" --unset=${NOBODY-} > /dev/null 2>&1 &
  wait
fi
"""


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """A folder with an `accelerate` that writes the words it is given, one JSON list a line, to the file `words` beside it."""
    program = tmp_path / "accelerate"
    record = f"open({str(tmp_path / 'words')!r}, 'a').write(json.dumps(sys.argv[1:]) + chr(10))"
    program.write_text(f"#!{sys.executable}\nimport json, sys\n{record}\n", encoding="utf-8")
    program.chmod(0o755)
    return tmp_path


def _of_bash(folder: Path, script: str) -> list[list[str]]:
    (folder / "words").unlink(missing_ok=True)
    file = folder / "script.sh"
    file.write_text(script, encoding="utf-8")
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, str(file)], env={"PATH": f"{folder}:{os.environ['PATH']}"}, cwd=folder, timeout=60, capture_output=True)
    return [json.loads(line) for line in (folder / "words").read_text(encoding="utf-8").splitlines()]


def _same(words: list[str], command: Command) -> bool:
    place = next(index for index, word in enumerate(words) if word.endswith(".py"))
    options, loose = options_of(words[place + 1 :])
    return (words[place], options, loose, options_of(words[1:place])[0]) == (
        command.script,
        dict(command.options),
        command.loose,
        dict(command.launcher),
    )


def test_a_script_gives_the_words_that_bash_gives(asked: Path) -> None:
    script = _SCRIPT.replace("$((40 + 2))", "42")
    (words,) = _of_bash(asked, script)
    (command,) = commands("train.sh", script)
    assert _same(words, command), (words, command)
    assert command.options["output_name"] == 'run "1e-4" $5' and command.options["optimizer_args"] == ["weight_decay=0.1", "betas=0.9,0.99"]


_PIECES = ["a", "B_1", "1e-4", "a.b/c", "x=y", "é", "0.9,0.99", "--flag", "-1"]


def _random_script(rng: random.Random) -> str:
    """Assignments and one call, of random words in random quotes, with variables and continued lines."""
    lines = ["#!/bin/bash", "# --not_me 'x"]
    names: list[str] = []

    def word() -> str:
        text = rng.choice(_PIECES)
        kind = rng.randrange(7)
        if kind == 0:
            return f"'{text} $V \\ \"in'"
        if kind == 1:
            return f'"{text}  \\" \\$no \\\\ it\'s"'
        if kind == 2 and names:
            return rng.choice(['"${%s}"', '"pre ${%s} post"', "a${%s}b", '"$%s"', '"${%s:-other}"']) % rng.choice(names)
        if kind == 3:
            return text + "\\ tail"
        if kind == 4:
            return f'"${{MISSING_HERE:-{text}}}"'
        return text

    for index in range(rng.randint(0, 4)):
        lines.append(rng.choice(["", "export "]) + f"V{index}={word()}")
        names.append(f"V{index}")
    call = ["accelerate", "launch", "train_network.py"]
    for index in range(rng.randint(1, 8)):
        call += [f"--o{index}" + rng.choice(["=", " "]) + word(), *(word() for _ in range(rng.randrange(2)))]
    text = "".join(part + rng.choice([" ", " \\\n  ", "\t", " \\\n"]) for part in call)
    return "\n".join(lines) + "\n" + text + rng.choice(["", "# end", "; exit 0", "&& echo done", "2>/dev/null", "| cat"]) + "\n"


def test_random_scripts_give_the_words_that_bash_gives(asked: Path) -> None:
    rng = random.Random(5)
    scripts = [_random_script(rng) for _ in range(120)]
    # One bash for all: each call stands in a subshell of its own, so that variables do not meet.
    words = _of_bash(asked, "\n".join(f"(\n{script}\n)" for script in scripts))
    assert len(words) == len(scripts)
    for given, script in zip(words, scripts, strict=True):
        (command,) = commands("x.sh", script)
        assert _same(given, command), f"{script}\n{given}\n{command}"


def test_batch_files_and_powershell_are_read_as_their_shells_read_them() -> None:
    batch = (
        '@echo off\r\nREM --x\r\n:: --y\r\nset "OUT=C:\\my out"\r\nset LR=1e-4\r\ncd /d %~dp0\r\n'
        'accelerate launch --num_processes=2 ^\r\n "sd-scripts\\train_network.py" ^\r\n --output_dir="%OUT%\\%name%" '
        "--learning_rate=%lr% ^\r\n"
        " --caption_separator=^& --flag & pause\r\n"
    )
    (command,) = commands("train.bat", batch)
    assert command.name == "train_network.py" and command.launcher == {"num_processes": "2"}
    wanted = {"output_dir": "C:\\my out\\%name%", "learning_rate": "1e-4", "caption_separator": "&", "flag": True}
    assert command.options == wanted and command_lines.unresolved(command.options["output_dir"]) == "%name%"
    power = (
        "<# --x #>\n$out = \"C:/my out\"  # --y\n$lr='1e-4'\n$more = Get-Content x\n"
        'accelerate launch ./sd-scripts/train_network.py `\n --output_dir=$out `\n --learning_rate "$lr" --name "a `"b`"" --z=$more\n'
    )
    (command,) = commands("train.ps1", power)
    assert command.options == {"output_dir": "C:/my out", "learning_rate": "1e-4", "name": 'a "b"', "z": "$more"}


def test_what_only_a_running_shell_knows_is_asked_for_and_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = (
        f"accelerate launch train_network.py --pretrained_model_name_or_path $(touch {mark}) --train_data_dir `touch {mark}` \\\n"
        "  --output_dir $WHERE --network_module networks.lora --network_dim 4\n"
    )
    found = importers.read("train.sh", text.encode())
    rows = {row.key: row for row in found.rows}
    for key in ("pretrained_model_name_or_path", "train_data_dir", "output_dir"):
        assert rows[key].verdict == "not supported" and "only the shell knows" in rows[key].text and key not in found.values
    assert not mark.exists() and found.values["network_dim"] == 4 and len(found.missing) == 2


def test_lines_of_kohyas_scripts_fill_the_kind_of_run_that_the_script_trains() -> None:
    for script, (family, method) in {
        "train_network.py": ("sd", "network"),
        "train_db.py": ("sd", "full"),
        "fine_tune.py": ("sd", "full"),
        "sdxl_train_network.py": ("sdxl", "network"),
        "sdxl_train.py": ("sdxl", "full"),
        "flux_train_network.py": ("flux", "network"),
        "flux_train.py": ("flux", "full"),
        "flux_train_network.py --model_type chroma": ("chroma", "network"),
    }.items():
        module = " --network_module=networks.lora" if method == "network" else ""
        text = f"accelerate launch {script} --pretrained_model_name_or_path=m --train_data_dir=d --learning_rate 3e-5{module}"
        found = importers.read("pasted.txt", text.encode())
        assert found.run is RUNS[family, method] and not found.missing, script
        assert found.values["learning_rate"] == 3e-5 and flat.build(found.run, found.values)
    for script, what in {
        "sd3_train.py": "Stable Diffusion 3",
        "train_textual_inversion.py": "embedding",
        "train_controlnet.py": "ControlNet",
    }.items():
        with pytest.raises(OptionError, match=what):
            importers.read("train.sh", f"accelerate launch {script} --learning_rate 1".encode())
    with pytest.raises(OptionError, match=r"starts caption\.py, which is no training"):
        importers.read("x.sh", b"python caption.py --folder x")


def test_a_script_with_two_trainings_gives_the_first_and_says_so() -> None:
    line = "accelerate launch train_network.py --network_module networks.lora --network_dim {}\n"
    found = importers.read("two.sh", (line.format(3) + line.format(5)).encode())
    assert found.values["network_dim"] == 3 and "2 trainings" in found.conflicts[0]


def test_lines_of_this_program_come_back_as_they_were() -> None:
    run = RUNS["sdxl", "network"]
    options = flat.build(run, {"pretrained_model_name_or_path": "m", "train_data_dir": "my images", "save_state": False, "network_dim": 3})
    line = " ".join(f"'{word}'" for word in command_line.to_argv(options))
    found = importers.read("run.sh", f"accelerate launch sd_scripts/{run.script} {line}".encode())
    assert flat.build(found.run, found.values) == options


def test_the_page_and_the_command_line_understand_kohyas_words_alike() -> None:
    """Each option that one of kohya's words becomes on a command line is the one that it becomes in an imported line."""
    from sd_scripts.schema import kohya_words

    run = RUNS["sdxl", "network"]
    known = flat.fields(run)
    base = {"pretrained_model_name_or_path": "m", "train_data_dir": "d"}
    given = {
        **{name: True for name in kohya_words.SWITCHES if name != "network_train_text_encoder_only"},
        "network_module": "networks.loha",
        "optimizer_type": "pagedlion8bit",
        "save_precision": "float16",
        "sample_sampler": "k_dpmsolver",
    }
    for name, value in given.items():
        both = {"network_module": "networks.lora", "network_train_unet_only": True, name: value}
        lined, _ = kohya_lines.translated(run, known, {**base, **both})
        text = " ".join(f"--{key}" if item is True else f"--{key}={item}" for key, item in {**base, **both}.items())
        imported = importers.read("x.sh", f"accelerate launch sdxl_train_network.py {text}".encode())
        one, two = flat.flatten(flat.build(run, lined)), flat.flatten(flat.build(run, imported.values))
        decided = (
            set(kohya_words.SWITCHES.get(name, {})) | {name} & known.keys() | ({"network_type"} if name == "network_module" else set())
        )
        decided &= known.keys()
        assert {key: one[key] for key in decided} == {key: two[key] for key in decided}, name


_CONDITIONS = """#!/bin/bash
is_v2=0; gpus={gpus}
kind="{kind}"
args=()
more=("--first {gpus}")
if [[ $gpus == 2 ]]; then
  args+=("--multi_gpu")
  args+=("--num_processes=2")
elif [ "$gpus" -ne 1 ]; then args+=("--others"); else args+=("--alone"); fi
if [ $is_v2 == 1 ]; then
  args+=("--v2")
else
  if [[ $kind != "sdxl" ]]; then more+=("--clip_skip 2"); fi
fi
if [ -n "$nothing_sets_this" ]; then args+=("--reg_data_dir x"); fi
if [ -z "$kind" ]; then kind=sd; fi
if true; then accelerate launch ${{args[@]}} train_network.py --kind="$kind" ${{more[@]}}; else accelerate launch wrong.py --x; fi
"""


def test_conditions_on_constants_choose_what_bash_chooses(asked: Path) -> None:
    for gpus in (1, 2, 3):
        for kind in ("sdxl", "sd1.5", ""):
            script = _CONDITIONS.format(gpus=gpus, kind=kind)
            (words,) = _of_bash(asked, script)
            (command,) = commands("x.sh", script)
            assert _same(words, command), (words, command)


_BRANCHES = """#!/bin/bash
kind="{kind}"; steps={steps}; reg=""; extra=()
cat > note.txt << END
it's no command: --seed 9
END
cat <<-'EOT' > /dev/null
\taccelerate launch wrong.py --kind "$kind
\tEOT
case "$kind" in
  sd|sd2) file=train_network.py ;;
  sdxl*) file=sdxl_train_network.py; extra+=(--v2) ;;
  *) file=flux_train_network.py
esac
if [ "$kind" == "sd" ] || [ "$kind" == "flux" ]; then extra+=(--first); fi
if [[ $steps -lt 20 && ! $kind == sd ]]; then steps=20; elif [ $steps -ge 100 ]; then steps=$((steps / 3 * 2 - 7 % 4)); fi
if [[ $reg ]]; then extra+=("--reg_data_dir $reg"); fi
if [[ -n $reg ]]; then extra+=(--more); fi
[ -n "$reg" ] && extra+=(--reg "$reg")
[ -z "$reg" ] && extra+=(--alone)
[ "$kind" = sdxl ] || extra+=(--others)
size="${{SIZE_HERE:-${{OTHER_HERE:-"512, 512"}}}}"
up=${{kind^^}}
accelerate launch "$file" --kind=$up --steps $steps --count "${{#extra[@]}}" --size "$size" --set=${{kind:+yes}} ${{extra[@]}}
"""


def test_branches_and_sums_come_out_as_in_bash(asked: Path) -> None:
    for kind in ("sd", "sd2", "sdxl", "sdxl_turbo", "flux", ""):
        for steps in (5, 50, 500):
            script = _BRANCHES.format(kind=kind, steps=steps)
            (words,) = _of_bash(asked, script)
            command = commands("x.sh", script)[0]
            assert _same(words, command), (words, command)


def test_what_a_branch_may_set_that_nobody_knows_to_be_taken_is_asked_for() -> None:
    shells = {
        "x.sh": "a=1\nb=2\nif [ -f there ]; then a=3; c=4; fi\naccelerate launch train_network.py --seed=$a --clip_skip=$b "
        "--keep_tokens=$c\n",
        "x.bat": "set a=1\nset b=2\nif exist there (\n set a=3\n set c=4\n)\naccelerate launch train_network.py --seed=%a% "
        "--clip_skip=%b% --keep_tokens=%c%\n",
        "x.ps1": "$a = 1\n$b = 2\nif (Test-Path there) { $a = 3; $c = 4 }\naccelerate launch train_network.py --seed=$a --clip_skip=$b "
        "--keep_tokens=$c\n",
    }
    for name, text in shells.items():
        (command,) = commands(name, text)
        assert command_lines.unresolved(command.options["seed"]), name
        assert (command.options["clip_skip"], command.options["keep_tokens"]) == ("2", "4"), name


def test_what_cmd_may_set_by_a_sum_or_after_another_condition_is_asked_for() -> None:
    text = "set a=1\nset b=1\nif exist there (\n set /a a=1+2\n) else if 1==1 (\n set b=3\n set /a c=2*2\n)\n"
    (command,) = commands("x.bat", f"{text}accelerate launch train_network.py --seed=%a% --clip_skip=%b% --keep_tokens=%c%\n")
    assert command_lines.unresolved(command.options["seed"]) and command_lines.unresolved(command.options["clip_skip"])
    assert command.options["keep_tokens"] == "4"


def test_a_script_that_a_script_writes_is_read_too() -> None:
    text = (
        "RANK=8\ncat > run.sh << EOF\naccelerate launch train_network.py \\\\\n  --network_dim=$RANK \\\\\n  --seed=3\nEOF\nbash run.sh\n"
    )
    (command,) = commands("setup.sh", text)
    assert command.options == {"network_dim": "8", "seed": "3"}
    for line in ('eval "$CMD"', 'bash -c "$CMD"', 'tmux new -s x "$CMD"', "$CMD"):
        (command,) = commands("x.sh", f"CMD='accelerate launch train_network.py --seed 3 --network_dim 8'\n{line}\n")
        assert command.options == {"network_dim": "8", "seed": "3"}, line


def test_marks_of_pages_for_readers_are_no_values() -> None:
    """Ellipses, signs of lines that go on in another shell, and angle brackets where a path is to be put."""
    text = (
        "accelerate launch train_network.py \\\n  --train_data_dir=<folder of images> \\\n  --network_dim 12 ... \\\n"
        "  --output_dir <out> \\\n"
        "  --learning_rate {lr} \\\n --seed 5 \\\\\n  --keep_tokens 2 ^\n --network_module networks.lora\n"
    )
    (command,) = commands("README.txt", text)
    assert {name: command.options[name] for name in ("network_dim", "seed", "keep_tokens")} == {
        "network_dim": "12",
        "seed": "5",
        "keep_tokens": "2",
    }
    found = importers.read("README.txt", text.replace("<out>", "<output dir>").encode())
    asked = [row.key for row in found.rows if "only the shell knows" in row.text]
    assert asked == ["train_data_dir", "output_dir", "learning_rate"] and found.values["network_dim"] == 12


def test_what_a_line_says_in_words_of_its_shell_gets_no_default_of_the_other_program() -> None:
    """It is in the line, so that no row may say that it is not; and what is not needed anyway is not asked for."""
    for script in ("train_network.py", "zimage_train_network.py --dit=m"):
        text = (
            f"accelerate launch --num_cpu_threads_per_process $CPUS {script} --network_module networks.lora --network_dim $RANK "
            "--network_alpha $RANK --learning_rate $LR --logging_dir $LOGS --clip_skip $SKIP\n"
        )
        found = importers.read("x.sh", text.encode())
        rows = {row.key: row for row in found.rows}
        assert {"network_dim", "network_alpha", "learning_rate"}.isdisjoint(found.values), script
        assert not [key for key in rows if "(not in the file)" in key], script
        assert rows["network_dim"].value == "$RANK" and rows["network_dim"].verdict == "not supported"
        assert rows["network_alpha"].verdict == "not supported"
        assert rows["logging_dir"].verdict == rows["num_cpu_threads_per_process"].verdict == "not needed"
        assert rows["clip_skip"].verdict == "not supported"
        assert "network_dim = $RANK: it holds $RANK, which only" in " ".join(found.conflicts)
    run = RUNS["sdxl", "network"]
    found = importers.read(
        "x.sh", f"accelerate launch sd_scripts/{run.script} --network_dim 8 --output_dir $OUT --no_save_state\n".encode()
    )
    assert "output_dir" not in found.values and found.values["network_dim"] == 8
    assert {row.key: row.verdict for row in found.rows}["output_dir"] == "not supported"


def test_the_file_of_options_that_a_line_names_is_read_beside_the_script(tmp_path: Path) -> None:
    settings = '[model]\npretrained_model_name_or_path = "m"\n[network]\nnetwork_module = "networks.lora"\nnetwork_dim = 4\nseed = 1\n'
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "lora.toml").write_text(settings + '[data]\ntrain_data_dir = "d"\n', encoding="utf-8")
    script = tmp_path / "train.sh"
    for named in ("./config/lora.toml", "config/lora", "/elsewhere/config/lora.toml"):
        text = f"accelerate launch --config_file acc.yaml train_network.py --config_file={named} --seed 7 --output_dir=o\n"
        found = importers.read("train.sh", text.encode(), importers.Opened(path=script))
        assert (found.values["network_dim"], found.values["seed"], found.missing) == (4, 7, []), named
        assert {row.key: row.verdict for row in found.rows}["config_file"] == "renamed"
    alone = importers.read("train.sh", text.encode())
    assert {row.key: row.verdict for row in alone.rows}["config_file"] == "not supported" and len(alone.missing) == 2
    assert "learning_rate" not in alone.values, "the file may say it"
    text = "accelerate launch --config_file acc.yaml train_network.py --network_module networks.lora --train_data_dir d\n"
    found = importers.read("train.sh", text.encode())
    assert {row.key: row.verdict for row in found.rows}["config_file"] == "not needed" and not found.conflicts


_POWERSHELL = """$base = "m.safetensors" # the model
$kind="sdxl"; $is_v2 = 0
$use_wandb = 1
$Env:HF_HOME = "hf"
$ext_args = [System.Collections.ArrayList]::new()
$list = @(
  "--seed", "5",
  '--note=it''s'
)
if ($kind -eq "sd1.5") { $file = "train_network" }
elseif ($kind -eq "sdxl") { $file = "sdxl_train_network" }
else { $file = "none" }
if ($is_v2) {
  [void]$ext_args.Add("--v2")
}
else {
  [void]$ext_args.Add("--max_token_length=225")
}
if ($use_wandb -eq 1) { [void]$ext_args.Add("--log_with=wandb") } else { [void]$ext_args.Add("--log_with=tensorboard") }
if ($reg_dir) { $ext_args += "--reg_data_dir=$reg_dir" }
python -m accelerate.commands.launch --num_cpu_threads_per_process=8 "./scripts/$file.py" `
  --pretrained_model_name_or_path=$base ` # goes on
  --cache="$Env:HF_HOME/x" @list `
  $ext_args --unknown=$(Get-Date)
Write-Output "done --seed 9"; pause
"""


_EXPRESSIONS = """param(
  [string]$out = "C:/out",
  [Parameter(Mandatory=$true)][int]$seed
)
$mode = "Qwen_Lora"; $rate = 1e-4; $flag = $False
$script = "train_network"
$note = ""# "one", 'two'
$text = Get-Content prompt.txt
$words = @("--save_state")
if ($mode -ilike "Qwen*") { $script = "qwen_image_" + $script } else { $script = "hv_" + $script }
if ($mode -ieq "qwen_lora" -and ($rate -lt 0.001 -or $flag)) { $words += "--low" }
if (-not $flag -and !$nothing) { $words += "--off" }
if ($mode -notlike "*_db" -and 3 -in @(1, 2, 3)) { $words += "--adapter" }
if ($mode -match "lora|dora") { $words.Add("--rank=" + (8 * 2 + 1)) | Out-Null }
switch ($mode) {
  "flux_lora" { $shift = 1 }
  "qwen_lora" { $shift = 2.2 }
  default { $shift = 3 }
}
$bits = if ($flag) { "fp16" } else { "bf16" }
$vae = Join-Path $out "vae.safetensors"
if ($note) { $words += "--note=$note" }
$more = "--max_train_epochs=3 --name `"a b`""
foreach ($one in $list) { $words += "--list=$one" }
try { $x = 1 } catch { $words += "--failed" }
$here = @"
[general]
it's "text"
"@
python -m accelerate.commands.launch --mixed_precision $bits "./musubi/$($script).py" `
  --out=$out `
  --seed=$seed --rate=$rate --flag=$flag --shift $shift --vae="$vae" --prompt $text `
  ("--kind=" + $mode.ToLower()) ("--date=" + $when.Year) $more @words 2>&1 | Tee-Object -FilePath log.txt
"""


def test_expressions_of_powershell_are_worked_out_where_they_are_constants() -> None:
    (command,) = commands("train.ps1", _EXPRESSIONS)
    assert command.name == "qwen_image_train_network.py" and command.launcher == {"mixed_precision": "bf16"}
    asked = {name for name, value in command.options.items() if command_lines.unresolved(value)}
    assert asked == {"seed", "prompt", "date", "list"}
    assert {name: value for name, value in command.options.items() if name not in asked} == {
        "out": "C:/out",
        "rate": "1e-4",
        "flag": "False",
        "shift": "2.2",
        "vae": "C:/out/vae.safetensors",
        "max_train_epochs": "3",
        "name": "a b",
        "save_state": True,
        "low": True,
        "off": True,
        "adapter": True,
        "rank": "17",
        "kind": "qwen_lora",
    }


def test_a_variable_of_powershell_that_cannot_be_worked_out_is_no_longer_what_it_was() -> None:
    """A script's name of before would be another model's."""
    (command,) = commands("x.ps1", '$file = "train_network"\n$file = $file.Replace("a", "b")\naccelerate launch "$file.py" --seed 1\n')
    assert command_lines.unresolved(command.script)


_BATCH = """@echo off
set kind=sdxl
set /a two=4/2
set /a gpus=%two%
set "more="
IF "%kind%"=="sd" (
  set script=train_network
) else if /i "%kind%"=="SDXL" (
  set script=sdxl_train_network
  if %gpus% GEQ 2 ( set "more=--multi_gpu" ) else ( set "more=--alone" )
) else (
  set script=none
)
if not defined kind set kind=none
if "%gpus%" neq "2" accelerate launch wrong.py --train=1
if exist venv\\Scripts\\activate.bat (call venv\\Scripts\\activate.bat) else (echo no)
if %gpus%==2 (accelerate launch %more% %script%.py --kind="%kind% (2)" --cut) else (accelerate launch wrong.py --train=2)
if "%unset%"=="" accelerate launch last_train.py --seed 1
"""


def test_conditions_on_constants_choose_what_cmd_chooses() -> None:
    found = commands("x.bat", _BATCH)
    assert [(command.name, command.launcher, command.options) for command in found] == [
        ("sdxl_train_network.py", {"multi_gpu": True}, {"kind": "sdxl (2)", "cut": True}),
        ("last_train.py", {}, {"seed": "1"}),
    ]


def test_zero_bytes_are_passed_over_as_shells_do() -> None:
    for name in ("x.sh", "x.bat", "x.ps1"):
        (command,) = commands(name, "accelerate launch sd\0xl_train_network.py --seed=\0005\n")
        assert (command.name, command.options) == ("sdxl_train_network.py", {"seed": "5"}), name


def test_what_a_batch_file_is_told_when_it_starts_is_asked_for() -> None:
    text = "for %%f in (1 2) do accelerate launch train_network.py --output_dir=%~dp0out --seed=%%f --network_dim=8 --train_data_dir=%1\r\n"
    (command,) = commands("x.bat", text)
    assert [name for name, value in command.options.items() if command_lines.unresolved(value)] == ["output_dir", "seed"]


def test_lists_and_conditions_of_powershell_become_the_words_of_the_command() -> None:
    (command,) = commands("train.ps1", _POWERSHELL)
    assert command.name == "sdxl_train_network.py" and command.launcher == {"num_cpu_threads_per_process": "8"}
    assert command.options == {
        "pretrained_model_name_or_path": "m.safetensors",
        "cache": "hf/x",
        "seed": "5",
        "note": "it's",
        "max_token_length": "225",
        "log_with": "wandb",
        "unknown": "$(Get-Date)",
    }


def test_the_beginning_of_an_option_is_the_option_as_in_the_other_program() -> None:
    """argparse takes it there, and lines of many people are written so."""
    line = "--network_module networks.lora --max_train_epoch 5 --save_every_n_epoch=2 --persistent_data_loader --seed 1 --sample x --lr 3"
    found = importers.read("x.sh", f"accelerate launch train_network.py --train_data_dir d {line}\n".encode())
    assert (found.values["max_train_epochs"], found.values["save_every_n_epochs"]) == (5, 2)
    rows = {row.key: row.verdict for row in found.rows}
    assert rows["persistent_data_loader_workers"] == "not needed" and rows["lr"] == rows["sample"] == "unknown", "several begin so"
    run = RUNS["sd", "network"]
    values, notes = kohya_lines.translated(run, flat.fields(run), {"max_train_epoch": 5, "sample": "x"})
    assert values == {"max_train_epochs": 5, "sample": "x"} and "--max_train_epoch: taken as max_train_epochs = 5" in notes


def test_optimizers_are_known_with_their_packages() -> None:
    line = "accelerate launch train_network.py --network_module networks.lora"
    for name, ours in {
        "prodigyopt.Prodigy": "Prodigy",
        "torch.optim.AdamW": "AdamW",
        "bitsandbytes.optim.AdamW8bit": "AdamW8bit",
        "bitsandbytes.optim.PagedAdamW8bit": "PagedAdamW8bit",
        "transformers.optimization.Adafactor": "Adafactor",
        "lion_pytorch.Lion": "Lion",
    }.items():
        found = importers.read("x.sh", f"{line} --optimizer_type {name}\n".encode())
        assert found.values.get("optimizer_type", "AdamW") == ours and not found.conflicts, name
    for name in ("torch.optim.RAdam", "somebody.Prodigy"):
        found = importers.read("x.sh", f"{line} --optimizer_type {name}\n".encode())
        assert [text for text in found.conflicts if "is not built in" in text], name


def test_what_accelerate_launch_has_for_tpus_is_not_needed() -> None:
    found = importers.read(
        "x.sh", b"accelerate launch --downcast_bf16=no train_network.py --network_module networks.lora --network_dim 4\n"
    )
    assert {row.key: row.verdict for row in found.rows}["downcast_bf16"] == "not needed"


def test_a_sentence_with_a_question_ends_with_it() -> None:
    line = "accelerate launch flux_2_train_network.py --dit klein --network_module networks.lora_flux_2 --timestep_sampling shfit\n"
    found = importers.read("x.sh", line.replace("timestep_sampling shfit", "lr_scheduler cosin").encode())
    (row,) = [row for row in found.rows if row.key == "lr_scheduler"]
    assert "Did you mean cosine? lr_scheduler stays" in row.text


def test_what_the_page_takes_for_a_line_the_studio_does_too() -> None:
    """The page is asked of the same texts in tests/js/pasted.test.js."""
    texts = json.loads((Path(__file__).parent / "pasted_texts.json").read_text(encoding="utf-8"))
    assert [text for text in texts["pasted.txt"] if not command_lines.looks_like(text)] == []
    assert [text for name in ("pasted.toml", "pasted.yaml", "") for text in texts[name] if command_lines.looks_like(text)] == []


def test_a_training_that_is_started_as_a_module_is_its_file() -> None:
    for start in ("python -m", "accelerate launch --num_processes 2 -m"):
        line = f"{start} library.flux_train_network --network_module=networks.lora_flux --network_dim 8"
        found = importers.read("pasted.txt", line.encode())
        assert found.run is RUNS["flux", "network"] and found.values["network_dim"] == 8


def test_a_pasted_line_with_paths_of_windows_keeps_them() -> None:
    """No mark of a line that goes on says for which shell it is."""
    line = r"python D:\sd\train_network.py --network_module networks.lora --train_data_dir=D:\my\new --output_dir .\out\new"
    for text in (line, rf'& "D:\venv\Scripts\accelerate.exe" launch {line.removeprefix("python ")}', line.replace(" --", "\n  --")):
        found = importers.read("pasted.txt", text.encode())
        assert (found.values["train_data_dir"], found.values["output_dir"]) == (r"D:\my\new", r".\out\new"), text
    (command,) = commands("pasted.txt", "accelerate launch train_network.py --caption_separator '\\n' --note a\\ b\n")
    assert command.options["note"] == "a b", "no path"


def test_clip_skip_has_no_effect_where_kohyas_scripts_have_none() -> None:
    for script in ("sdxl_train_network.py", "flux_train_network.py"):
        found = importers.read("x.sh", f"accelerate launch {script} --network_module networks.lora --clip_skip 2\n".encode())
        assert {row.key: row.verdict for row in found.rows}["clip_skip"] == "not needed" and not found.conflicts
    run = RUNS["sdxl", "network"]
    values, notes = kohya_lines.translated(run, flat.fields(run), {"clip_skip": 2})
    assert not values and "without effect" in notes[0]


def test_brackets_and_conditions_of_thousands_are_refused_in_a_sentence() -> None:
    deep = {
        "x.ps1": f"$a = {'(' * 3000}1{')' * 3000}\naccelerate launch train_network.py --seed $a\n",
        "x.sh": f"accelerate launch train_network.py --seed {'${a:-' * 3000}{'}' * 3000}\n",
        "y.sh": f"if {'! ' * 4000}true; then accelerate launch train_network.py --seed 1; fi\n",
    }
    for name, text in deep.items():
        with pytest.raises(OptionError, match="inside one another, hundreds deep"):
            importers.read(name, text.encode())
