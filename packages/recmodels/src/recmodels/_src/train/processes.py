"""What differs when several processes train one model, joined by `jax.distributed`.

Every process runs the same program on the same arguments. Files of the run that are not arrays are
written by the first one alone; the folder must be one that all processes see.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils

from recmodels._src.errors import UserError


def join_processes() -> None:
    """Joins the processes of a slice or cluster that JAX can find out about by itself.

    Raises:
        UserError: it cannot, or JAX is in use already.
    """
    try:
        jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"--distributed found no other processes to join ({error}); it needs a TPU slice or a "
            "cluster that JAX knows. Elsewhere call jax.distributed.initialize with an address and "
            "then recmodels.train."
        ) from None


def is_first() -> bool:
    """Whether this process writes the files of the run; True when it is the only one."""
    return jax.process_index() == 0


def wait_for_all(where: str) -> None:
    """Returns once every process has come here; at once when there is one."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


def any_of_all(flag: bool) -> bool:
    """Whether `flag` is true in any process; all of them must ask."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def to_host(array: jax.Array) -> np.ndarray:
    """The whole array, also where parts of it live on devices of other processes."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
