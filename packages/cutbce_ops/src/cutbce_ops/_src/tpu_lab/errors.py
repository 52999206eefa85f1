"""What goes wrong: the TPU compiler is missing, or refuses, or runs out of memory."""

INSTALL_LINE = 'pip install "cutbce-ops[tpu-lab]"'


class TpuCompilerMissingError(ImportError):
    """A package that the TPU lab needs is missing; the message has the line that installs it."""

    def __init__(self, package: str) -> None:
        super().__init__(f"{package}, which the TPU lab needs, is not installed: {INSTALL_LINE}")


class TpuCompileError(RuntimeError):
    """The TPU compiler refused the program; the message is the compiler's own."""


class DoesNotFitError(TpuCompileError):
    """The program needs more HBM or VMEM than the chip has; the message is the compiler's own."""
