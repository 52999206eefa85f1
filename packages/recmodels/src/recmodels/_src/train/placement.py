"""Where the training state and the batches live, on one device or on a mesh of them."""

import dataclasses

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import cutbce_ops
from recmodels._src.errors import UserError
from recmodels._src.recipe import Recipe
from recmodels._src.train.step import TrainStep, make_train_step

DATA_AXIS = "data"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Data parallelism: the state on every device, the batch split over all of them."""

    mesh: Mesh | None  # one axis called "data"; None means one device and no sharding at all

    @classmethod
    def of_this_machine(cls, recipe: Recipe) -> "Placement":
        """All devices of this process when there are several.

        Raises:
            UserError: the batch cannot be split evenly over them.
        """
        devices = jax.local_devices()
        if len(devices) == 1:
            return cls(None)
        return cls.over(jax.make_mesh((len(devices),), (DATA_AXIS,), devices=devices), recipe)

    @classmethod
    def over(cls, mesh: Mesh, recipe: Recipe) -> "Placement":
        """The devices of `mesh`; see `of_this_machine`."""
        if recipe.batch_size % mesh.size:
            raise UserError(
                f"`batch_size` must be a multiple of the {mesh.size} devices; "
                f"got {recipe.batch_size}."
            )
        # Auto axes: the partitioner derives the rest of the step from state, batch and loss.
        axis_types = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
        return cls(Mesh(mesh.devices, mesh.axis_names, axis_types=axis_types))

    @property
    def state(self) -> jax.sharding.Sharding:
        """Sharding of every array of the training state."""
        if self.mesh is None:
            return SingleDeviceSharding(jax.local_devices()[0])
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> jax.sharding.Sharding:
        """Sharding of history and targets: split along the first axis."""
        if self.mesh is None:
            return self.state
        return NamedSharding(self.mesh, PartitionSpec(DATA_AXIS))

    def compile_step(self, recipe: Recipe) -> TrainStep:
        """The compiled `step(state, history, targets, capacity)`; it consumes the state it gets."""
        loss_sharding = None
        if self.mesh is not None:
            loss_sharding = cutbce_ops.LossSharding(self.mesh, position_axes=DATA_AXIS)
        return jax.jit(
            make_train_step(recipe, sharding=loss_sharding),
            static_argnums=3,
            donate_argnums=0,
            in_shardings=(self.state, self.batch, self.batch),
            out_shardings=self.state,
        )
