"""A TPU compiler without a TPU: memory, collectives, kernel schedules and time of a program.

Everything here is estimated by the TPU compiler, not run on a TPU. Needs libtpu:
`pip install "cutbce-ops[tpu-lab]"`.
"""

from cutbce_ops._src.tpu_lab.api import compile_for as compile_for
from cutbce_ops._src.tpu_lab.api import measure_kernel as measure_kernel
from cutbce_ops._src.tpu_lab.bundles import KernelLoop as KernelLoop
from cutbce_ops._src.tpu_lab.bundles import Schedule as Schedule
from cutbce_ops._src.tpu_lab.bundles import parse_schedule as parse_schedule
from cutbce_ops._src.tpu_lab.chips import CHIPS as CHIPS
from cutbce_ops._src.tpu_lab.chips import Chip as Chip
from cutbce_ops._src.tpu_lab.chips import chip as chip
from cutbce_ops._src.tpu_lab.chips import mesh_for as mesh_for
from cutbce_ops._src.tpu_lab.chips import target as target
from cutbce_ops._src.tpu_lab.collectives import Collective as Collective
from cutbce_ops._src.tpu_lab.collectives import collectives as collectives
from cutbce_ops._src.tpu_lab.compiler import Compiler as Compiler
from cutbce_ops._src.tpu_lab.errors import DoesNotFitError as DoesNotFitError
from cutbce_ops._src.tpu_lab.errors import TpuCompileError as TpuCompileError
from cutbce_ops._src.tpu_lab.errors import TpuCompilerMissingError as TpuCompilerMissingError
from cutbce_ops._src.tpu_lab.hlo import HloSummary as HloSummary
from cutbce_ops._src.tpu_lab.hlo import KernelCall as KernelCall
from cutbce_ops._src.tpu_lab.hlo import XlaOperation as XlaOperation
from cutbce_ops._src.tpu_lab.hlo import summarize as summarize
from cutbce_ops._src.tpu_lab.report import CollectiveEstimate as CollectiveEstimate
from cutbce_ops._src.tpu_lab.report import KernelEstimate as KernelEstimate
from cutbce_ops._src.tpu_lab.report import Memory as Memory
from cutbce_ops._src.tpu_lab.report import OperationEstimate as OperationEstimate
from cutbce_ops._src.tpu_lab.report import TpuReport as TpuReport
