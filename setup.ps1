# The Windows twin of setup.sh: makes .venv, installs the pinned packages, then starts what was asked for.
# powershell -ExecutionPolicy Bypass -File setup.ps1 [install|gui|demo|toys|test|doctor] [arguments]
$ErrorActionPreference = "Stop"
# Exit codes of programs are looked at below, with a sentence for each.
$PSNativeCommandUseErrorActionPreference = $false
if ($env:OS -ne "Windows_NT") {
    [Console]::Error.WriteLine("setup: on Linux and macOS use the twin of this file: bash setup.sh")
    exit 1
}
$here = $PSScriptRoot
$venv = Join-Path $here ".venv"
$python = Join-Path $venv "Scripts\python.exe"
$stamp = Join-Path $venv ".setup-stamp"
$keptTorch = Join-Path $venv ".setup-torch-spec"

function Stop-With([string]$text, [int]$code = 1) {
    [Console]::Error.WriteLine("setup: $text")
    exit $code
}

# UTF-8 without a mark, whatever version of PowerShell this is: a path in TORCH_SPEC may have any letters. Written aside, so that nobody
# meets half of it.
function Write-Text([string]$path, [string[]]$lines) {
    $aside = "$path.new"
    [IO.File]::WriteAllLines($aside, $lines)
    if (Test-Path -LiteralPath $path) { [IO.File]::Replace($aside, $path, [NullString]::Value) } else { [IO.File]::Move($aside, $path) }
}

function Show-Usage {
    @"
usage: powershell -ExecutionPolicy Bypass -File setup.ps1 [install|gui|demo|toys|test|doctor] [arguments]

  install           make .venv and install what the product needs (the default); quick when nothing changed
  install --dry_run say which Python and which torch would be taken, and change nothing
  gui [...]         install if needed, then open the studio; arguments go to gui.py
  demo [...]        install if needed, then train a LoRA on the built-in toy base and write before_after.png
  toys [FAMILY ...] install if needed, then train what the toy presets teach and write docs/toys.md, with grids and figures
  test [...]        install with the test extras, then run style, types and tests; further arguments go to pytest.
                    --all instead runs every test, those that take minutes too, a folder at a time; --busy runs each
                    folder ten times while two other processes compute; --mutants puts known faults into copies of
                    the program and says which of them the tests notice. These three go on where they were stopped
  doctor [...]      say what is installed, which devices there are, and what will not work

environment:
  PYTHON      the Python that makes .venv, 3.11 to 3.13; found by itself otherwise
  TORCH_SPEC  arguments of pip that install torch, for another build or version, for example
              torch==2.13.0 --index-url ADDRESS with the address that pytorch.org shows for your system.
              The standard build for Windows uses the CPU only, so an NVIDIA GPU needs this. It is remembered.
"@
}

# --- Python ----------------------------------------------------------------------------------------------------------

# A candidate is a command with its arguments, because the launcher is called as "py -3.12".
function Get-Version([string[]]$candidate) {
    $rest = @($candidate | Select-Object -Skip 1) + @("-c", "import platform; print(platform.python_version())")
    try {
        # A program's complaint on its error channel must not end this script.
        $ErrorActionPreference = "Continue"
        $text = & $candidate[0] @rest 2>$null
        if ($LASTEXITCODE -eq 0) { return "$text".Trim() }
    } catch { }
    return ""
}

function Test-Version([string]$version) { return $version -match '^3\.(11|12|13)\.' }

function Find-Python {
    if ($env:PYTHON) {
        $version = Get-Version @($env:PYTHON)
        if (-not $version) { Stop-With "PYTHON=$($env:PYTHON) does not start; give the path of a Python 3.11, 3.12 or 3.13." }
        if (-not (Test-Version $version)) { Stop-With "PYTHON=$($env:PYTHON) is Python $version; 3.11, 3.12 or 3.13 is needed." }
        return , @($env:PYTHON)
    }
    foreach ($candidate in @(@("py", "-3.12"), @("py", "-3.13"), @("py", "-3.11"), @("python"), @("python3"))) {
        if (Test-Version (Get-Version $candidate)) { return , @($candidate) }
    }
    Stop-With "no Python 3.11, 3.12 or 3.13 found; install one, or set PYTHON to the path of its python.exe."
}

function Initialize-Venv {
    if (Test-Path -LiteralPath $python) {
        $version = Get-Version @($python)
        if (Test-Version $version) {
            if ($env:PYTHON) {
                $asked = Get-Version (Find-Python)
                if ($asked -ne $version) { Stop-With ".venv has Python $version and PYTHON=$($env:PYTHON) is $asked; delete the folder .venv to change, or leave PYTHON unset." }
            }
            Initialize-Pip
            return
        }
        if ($version) { Stop-With ".venv has Python $version; 3.11, 3.12 or 3.13 is needed. Delete the folder .venv and run this again." }
    }
    $base = Find-Python
    Write-Host "Making .venv with Python $(Get-Version $base)."
    $rest = @($base | Select-Object -Skip 1) + @("-m", "venv", "--clear", $venv)
    & $base[0] @rest
    if ($LASTEXITCODE -ne 0) { Stop-With "this Python cannot make a virtual environment; the lines above say why." }
    Initialize-Pip
}

function Initialize-Pip {
    if (Test-Module "pip") { return }
    & $python -m ensurepip --upgrade | Out-Null
    if ($LASTEXITCODE -ne 0) { Stop-With ".venv has no pip and cannot get it; the lines above say why. Delete the folder .venv and run this again." }
}

function Test-Module([string]$name) {
    $ErrorActionPreference = "Continue"
    & $python -m $name --version 2>$null | Out-Null
    return $LASTEXITCODE -eq 0
}

# --- torch -----------------------------------------------------------------------------------------------------------

function Get-DefaultTorch {
    $line = Get-Content -LiteralPath (Join-Path $here "requirements.txt") | Where-Object { $_ -match '^torch==' } | Select-Object -First 1
    return ($line -split '[ #;]')[0]
}

function Get-KeptTorch {
    if (Test-Path -LiteralPath $keptTorch) { return [IO.File]::ReadAllText($keptTorch).Trim() }
    return ""
}

function Get-TorchSpec {
    if ($env:TORCH_SPEC) { return $env:TORCH_SPEC }
    $kept = Get-KeptTorch
    if ($kept) { return $kept }
    return Get-DefaultTorch
}

function Show-Torch([string]$spec) {
    if ($env:TORCH_SPEC) {
        Write-Host "Taking '$spec', because TORCH_SPEC says so."
    } elseif (Get-KeptTorch) {
        Write-Host "Taking '$spec', because TORCH_SPEC said so when .venv was made."
    } elseif (Get-Command nvidia-smi -ErrorAction SilentlyContinue) {
        Write-Host "Taking $spec, which will use the CPU only: an NVIDIA driver is here, but the standard build for Windows has no CUDA. For the GPU set TORCH_SPEC to '$spec --index-url ADDRESS', with the address that pytorch.org shows for CUDA, and run this again."
    } else {
        Write-Host "Taking $spec, because no NVIDIA driver is found and the standard build for Windows is the one for the CPU."
    }
}

function Get-InstalledTorch {
    $ErrorActionPreference = "Continue"
    $text = & $python -c "from importlib.metadata import version; print(version('torch'))" 2>$null
    if ($LASTEXITCODE -eq 0) { return "$text".Trim() }
    return ""
}

# --- packages --------------------------------------------------------------------------------------------------------

function Invoke-Pip([string[]]$words, [string]$what) {
    & $python -m pip install --disable-pip-version-check --no-input @words
    if ($LASTEXITCODE -ne 0) { Stop-With "pip could not install $what; the lines above say why. Run the same command again to go on." }
}

function Get-Fingerprint([string]$name) {
    $hash = (Get-FileHash -LiteralPath (Join-Path $here $name) -Algorithm SHA256).Hash
    return "$name $hash python $(Get-Version @($python)) $(Get-TorchSpec)"
}

function Install-Torch {
    $spec = Get-TorchSpec
    Show-Torch $spec
    $words = @($spec -split ' +' | Where-Object { $_ })
    $before = Get-KeptTorch
    if (-not $before) { $before = Get-DefaultTorch }
    # The same version of another build satisfies pip, so a changed TORCH_SPEC has to be forced.
    if ((Get-InstalledTorch) -and $env:TORCH_SPEC -and $env:TORCH_SPEC -ne $before) { $words = @("--force-reinstall") + $words }
    Invoke-Pip $words "'$spec'"
    if ($env:TORCH_SPEC) {
        if ($env:TORCH_SPEC -eq (Get-DefaultTorch)) {
            if (Test-Path -LiteralPath $keptTorch) { Remove-Item -LiteralPath $keptTorch }
        } else {
            Write-Text $keptTorch @($env:TORCH_SPEC)
        }
    }
}

# Everything in a requirement file except torch, which is held at the version that is there.
function Install-File([string]$name) {
    $have = Get-InstalledTorch
    if (-not $have) { Stop-With "torch is not installed although pip said so; TORCH_SPEC must name torch." }
    $constraint = Join-Path $venv ".setup-constraint.txt"
    $copy = Join-Path $venv ".setup-$name"
    Write-Text $constraint @("torch==$have")
    Write-Text $copy @([IO.File]::ReadAllLines((Join-Path $here $name)) | Where-Object { $_ -notmatch '^torch==' })
    Invoke-Pip @("-r", $copy, "-c", $constraint) $name
}

function Install-All([string[]]$extra = @()) {
    Initialize-Venv
    $changed = $false
    foreach ($name in @("requirements.txt") + $extra) {
        $there = @()
        if (Test-Path -LiteralPath $stamp) { $there = @([IO.File]::ReadAllLines($stamp)) }
        if ($there -ccontains (Get-Fingerprint $name)) { continue }
        if ($name -eq "requirements.txt") { Install-Torch }
        Install-File $name
        $kept = @($there | Where-Object { -not $_.StartsWith("$name ") })
        Write-Text $stamp ($kept + @(Get-Fingerprint $name))
        $changed = $true
    }
    if ($changed) { Write-Host "Installed in $venv." } else { Write-Host "Everything is installed, nothing to do." }
}

# What checks the page's modules; without node the tests say that they are skipped.
function Install-NodeTools {
    $folder = Join-Path $here "tests\js"
    $lockFile = Join-Path $folder "package-lock.json"
    $mark = Join-Path $folder "node_modules\.setup-stamp"
    if (-not (Test-Path -LiteralPath $lockFile)) { return }
    # npm.cmd: npm alone is a script that the execution policy may forbid.
    if (-not (Get-Command npm.cmd -ErrorAction SilentlyContinue)) { Write-Host "There is no node; the page's modules are not checked."; return }
    $lock = (Get-FileHash -LiteralPath $lockFile -Algorithm SHA256).Hash
    if ((Test-Path -LiteralPath $mark) -and [IO.File]::ReadAllText($mark).Trim() -eq $lock) { return }
    Push-Location -LiteralPath $folder
    try { & npm.cmd ci --engine-strict --no-audit --no-fund } finally { Pop-Location }
    if ($LASTEXITCODE -eq 0) {
        Write-Text $mark @($lock)
    } else {
        $made = Join-Path $folder "node_modules"
        if (Test-Path -LiteralPath $made) { Remove-Item -LiteralPath $made -Recurse -Force }
        Write-Host "npm could not install what checks the page's modules; the lines above say why. They are not checked."
    }
}

# --- what runs -------------------------------------------------------------------------------------------------------

function Invoke-Step([string[]]$words) {
    & $python @words
    if ($LASTEXITCODE -ne 0) { exit $LASTEXITCODE }
}

$command = "install"
$rest = @()
if ($args.Count -gt 0) { $command = "$($args[0])" }
if ($args.Count -gt 1) { $rest = @($args[1..($args.Count - 1)] | ForEach-Object { "$_" }) }

switch -CaseSensitive ($command) {
    { $_ -in "--help", "-h", "help" } { Show-Usage; break }
    "install" {
        if ($rest.Count -eq 0) {
            Install-All
        } elseif ($rest[0] -eq "--dry_run") {
            # One that does not start is made anew, as by install.
            $version = Get-Version @($python)
            if ($version) { Write-Host "Python $version of .venv is used." }
            else { $base = Find-Python; Write-Host "Python $(Get-Version $base) ($($base -join ' ')) would make .venv." }
            Show-Torch (Get-TorchSpec)
        } else {
            Stop-With "install does not know '$($rest[0])'; it knows --dry_run." 2
        }
        break
    }
    "gui" { Install-All; Invoke-Step (@((Join-Path $here "gui.py")) + $rest); break }
    "demo" { Install-All; Set-Location -LiteralPath $here; Invoke-Step (@("-m", "sd_scripts.toy.demo") + $rest); break }
    "toys" { Install-All; Set-Location -LiteralPath $here; Invoke-Step (@("-m", "sd_scripts.toy.gallery") + $rest); break }
    "test" { Install-All @("requirements-test.txt"); Install-NodeTools; Set-Location -LiteralPath $here; & $python @(@("-m", "tests") + $rest); exit $LASTEXITCODE }
    "doctor" {
        if (-not (Test-Path -LiteralPath $python)) { Stop-With "nothing is installed yet; run: powershell -ExecutionPolicy Bypass -File setup.ps1 install" }
        Set-Location -LiteralPath $here
        Invoke-Step (@("-m", "sd_scripts.doctor") + $rest)
        break
    }
    default { Stop-With "'$command' is not a sub-command; they are install, gui, demo, toys, test and doctor (setup.ps1 --help)." 2 }
}
