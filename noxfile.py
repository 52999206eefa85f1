"""Every job of the repository. `nox -l` lists them; each makes its own environment."""

import os
import pathlib
import platform
import shutil

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests"]

ROOT = pathlib.Path(__file__).parent
PACKAGES = ("cutbce_ops", "recmodels", "recserve")
# One pytest run for each: their helper modules share names.
FOLDERS_WITH_TESTS = (*(f"packages/{package}" for package in PACKAGES), "examples", "tools")
TOOLS = ("ruff", "basedpyright", "build", "jax[tpu]")
EDITABLE = (
    *("-e", "packages/cutbce_ops"),
    *("-e", "packages/recmodels[report]"),
    *("-e", "packages/recserve[scann,encode]"),
)
CONSTRAINTS = ROOT / "constraints" / f"py{'.'.join(platform.python_version_tuple()[:2])}.txt"


def _install(session: nox.Session, *requirements: str) -> None:
    """Installs pinned versions, so that a run today equals a run next year."""
    if not CONSTRAINTS.exists():
        session.error(f"{CONSTRAINTS.name} is missing: supported are Python 3.11, 3.12 and 3.13.")
    session.install("--constraint", str(CONSTRAINTS), *requirements)


def _group(package: str, group: str) -> list[str]:
    pyproject = nox.project.load_toml(ROOT / "packages" / package / "pyproject.toml")
    return nox.project.dependency_groups(pyproject, group)


def _test_requirements() -> list[str]:
    return [requirement for package in PACKAGES for requirement in _group(package, "test")]


def _install_packages(session: nox.Session, *requirements: str) -> None:
    """Installs the three packages, editable, and what the job needs besides."""
    _install(session, *EDITABLE, *requirements)


def _on_cpu() -> dict[str, str]:
    # A machine with a GPU would otherwise run the tests with other roundings.
    return {"JAX_PLATFORMS": "cpu"}


@nox.session
def demo(session: nox.Session) -> None:
    """From generated (or given) interactions to a served top-8: -- --data PATH --format FORMAT."""
    _install_packages(session)
    session.run("python", "examples/demo.py", *session.posargs, env=_on_cpu())


@nox.session
def tests(session: nox.Session) -> None:
    """Every test that needs no accelerator."""
    _install_packages(session, *_test_requirements())
    for folder in FOLDERS_WITH_TESTS:
        _pytest(session, folder, "not slow and not tpu_compiler")


@nox.session(name="tests-slow")
def tests_slow(session: nox.Session) -> None:
    """The tests that take minutes."""
    _install_packages(session, *_test_requirements())
    for folder in FOLDERS_WITH_TESTS:
        _pytest(session, folder, "slow and not tpu_compiler", may_be_empty=True)


@nox.session(name="tests-tpu")
def tests_tpu(session: nox.Session) -> None:
    """Compiles for TPU slices that are not attached; on a TPU machine runs the tests there too."""
    _install_packages(session, *_test_requirements(), "jax[tpu]")
    session.run("python", "tools/tests_tpu.py", *session.posargs)


@nox.session(name="tests-gpu")
def tests_gpu(session: nox.Session) -> None:
    """With an NVIDIA GPU runs the GPU tests and a benchmark on it; without one passes over."""
    found = session.run("python", "tools/tests_gpu.py", "find", silent=True).strip()
    print(found, flush=True)
    if "no GPU attached" in found:
        return
    _install_packages(session, *_test_requirements(), found.split(": ")[-1])
    session.run("python", "tools/tests_gpu.py", "run", *session.posargs)


def _pytest(session: nox.Session, folder: str, markers: str, *, may_be_empty: bool = False) -> None:
    # Many tests start processes that compile the same program: they share what is compiled.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(session.cache_dir / "jax")}
    session.run(
        *("python", "-m", "pytest", folder, "-m", markers, *session.posargs),
        env=_on_cpu() | cache,
        success_codes=[0, 5] if may_be_empty else [0],
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Style, formatting, import layers and the repository's own rules."""
    _install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "tools/check_layers.py")
    session.run("python", "tools/check_repository.py")


@nox.session
def types(session: nox.Session) -> None:
    """Static types of everything under src."""
    _install_packages(session, *_test_requirements(), "basedpyright")
    session.run("basedpyright", "--level", "error")


@nox.session
def wheels(session: nox.Session) -> None:
    """Builds the wheels and tests them, installed, from another folder."""
    _install(session, "build")
    out = pathlib.Path(session.create_tmp()).resolve() / "wheels"
    shutil.rmtree(out, ignore_errors=True)
    for package in PACKAGES:
        session.run("python", "-m", "build", "--wheel", "--outdir", str(out), f"packages/{package}")
    found = {package: str(next(out.glob(f"{package}-*.whl"))) for package in PACKAGES}
    smoke = str(ROOT / "tools" / "smoke_test.py")
    pip = ("pip", "install", "--quiet", "--constraint", str(CONSTRAINTS))
    for name, wanted in (
        ("ops-alone", [found["cutbce_ops"]]),
        ("all", [found["cutbce_ops"], found["recmodels"], found["recserve"] + "[scann,encode]"]),
    ):
        environment = out.parent / name
        session.run("python", "-m", "venv", "--clear", str(environment))
        python = str(environment / "bin" / "python")
        session.run(python, "-m", *pip, *wanted, external=True)
        with session.chdir(out.parent):  # nothing of the source tree may be importable
            session.run(python, "-I", smoke, name, external=True, env=_on_cpu())


@nox.session
def bench(session: nox.Session) -> None:
    """Time and memory of the loss against its alternatives, side by side in one run."""
    _install_packages(session, *_group("cutbce_ops", "bench"))
    session.run(
        "python", "packages/cutbce_ops/benchmarks/bench_binary_cross_entropy.py",
        *session.posargs, env=_on_cpu() | {"KERAS_BACKEND": "jax"},
    )  # fmt: skip


@nox.session(name="bench-data")
def bench_data(session: nox.Session) -> None:
    """Rate and memory of `recmodels prepare`: -- --events 200_000_000 (default: 20 million)."""
    _install_packages(session)
    script = "packages/recmodels/benchmarks/bench_prepare.py"
    session.run("python", script, *session.posargs, env=_on_cpu())


@nox.session(name="bench-input")
def bench_input(session: nox.Session) -> None:
    """Rate of the training batches against what a trainer on this CPU consumes."""
    _install_packages(session)
    script = "packages/recmodels/benchmarks/bench_input.py"
    session.run("python", script, *session.posargs, env=_on_cpu())


@nox.session(name="bench-training")
def bench_training(session: nox.Session) -> None:
    """Training throughput and memory against PyTorch: -- --shapes beauty --rounds 9."""
    # Any build of PyTorch serves, and the usual one brings gigabytes for GPUs: PIP_CONSTRAINT can
    # name the version of which there is a build for CPUs at hand.
    _install_packages(session, *_group("recmodels", "bench"))
    script = "packages/recmodels/benchmarks/bench_training.py"
    session.run("python", script, *session.posargs, env=_on_cpu())


@nox.session(name="bench-tpu")
def bench_tpu(session: nox.Session) -> None:
    """Schedules of the TPU kernels and of the published algorithm; needs no TPU, takes minutes."""
    _install_packages(session, "jax[tpu]")
    script = "packages/cutbce_ops/benchmarks/bench_tpu_schedule.py"
    session.run("python", script, *session.posargs, env=_on_cpu())


@nox.session
def constraints(session: nox.Session) -> None:
    """Rewrites the constraints file of the running Python from the newest releases allowed."""
    session.install(*EDITABLE, *_test_requirements(), *_group("cutbce_ops", "bench"), *TOOLS)
    frozen = session.run("python", "-m", "pip", "freeze", "--exclude-editable", silent=True)
    temporary = CONSTRAINTS.with_suffix(".tmp")
    temporary.write_text(frozen)
    os.replace(temporary, CONSTRAINTS)
