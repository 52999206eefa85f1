"""A Python function as a program that another process can compile for a slice."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from cutbce_ops._src.tpu_lab.chips import mesh_for
from cutbce_ops._src.tpu_lab.topology import require


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, traced and lowered for TPU, with what the compiling process has to know."""

    exported: bytes
    """The lowered function of flat arguments and results, as `jax.export` writes it."""
    donated: tuple[int, ...]
    """Numbers of the flat arguments that the results may overwrite."""
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    axis_types: tuple[str, ...]
    device_ids: tuple[int, ...]
    """Devices of the slice in the order of the mesh; empty to leave that to the compiler."""


def lower(
    fn: Callable[..., Any],
    topology: str,
    args: Sequence[Any],
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    mesh: Mesh | AbstractMesh | None = None,
) -> Program:
    """Traces the function and lowers it for TPU; see `compile_for` for the arguments."""
    require("flatbuffers")  # jax.export writes with it
    shapes = _flat_shapes(args, in_shardings)
    tree = jax.tree.structure(tuple(args))
    mesh = mesh or _mesh_of(shapes, jax.tree.leaves(out_shardings))
    context = _with_chip(topology, mesh)
    shapes = [_on_mesh(shape, mesh, context) for shape in shapes]

    def flat(*arrays: Any) -> tuple[Any, ...]:
        return tuple(jax.tree.leaves(fn(*jax.tree.unflatten(tree, arrays))))

    donated = _flat_numbers(args, donate_argnums)
    options: dict[str, Any] = {"donate_argnums": donated}
    # Some Pallas operations ask the mesh in scope for the chip.
    with jax.sharding.use_abstract_mesh(context):
        if out_shardings is not None:
            outputs = jax.eval_shape(fn, *jax.tree.unflatten(tree, shapes))
            spread = _spread(out_shardings, outputs, "out_shardings")
            options["out_shardings"] = tuple(spread)
        exported = _export(jax.jit(flat, **options), shapes, mesh)
    return _program(exported.serialize(), donated, mesh)


def _program(
    exported: bytes, donated: tuple[int, ...], mesh: Mesh | AbstractMesh | None
) -> Program:
    if mesh is None:
        return Program(exported, donated, (1,), ("device",), ("Auto",), ())
    devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else []
    absent = all(device.platform == "tpu" for device in devices)
    return Program(
        exported=exported,
        donated=donated,
        mesh_shape=tuple(mesh.axis_sizes),
        axis_names=tuple(str(name) for name in mesh.axis_names),
        axis_types=tuple(kind.name for kind in mesh.axis_types),
        device_ids=tuple(device.id for device in devices) if absent else (),
    )


def _export(jitted: Any, shapes: Sequence[Any], mesh: Mesh | AbstractMesh | None) -> Any:
    from jax import export

    try:
        exported = export.export(jitted, platforms=["tpu"])(*shapes)
    except ValueError as error:
        if mesh is None and "context mesh" in str(error):
            raise ValueError(_NO_MESH) from error
        # The same JAX reads it right away, so nothing has to stay compatible.
        names = re.findall(r"'([\w.$]+)'", str(error)) if "compatibility" in str(error) else []
        if not names:
            raise
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in names]
        exported = export.export(jitted, platforms=["tpu"], disabled_checks=checks)(*shapes)
    if exported.nr_devices > 1 and mesh is None:
        raise ValueError(_NO_MESH)
    return exported


_NO_MESH = (
    "The program uses a mesh that none of its arguments and results is laid out over: "
    "give it as `mesh`."
)


def _with_chip(topology: str, mesh: Mesh | AbstractMesh | None) -> AbstractMesh:
    """The mesh of the program with the kind of its devices."""
    if mesh is None:
        return mesh_for(topology, (1,), ("device",))
    one = mesh_for(topology, (1,), ("device",))
    return AbstractMesh(
        mesh.axis_sizes, mesh.axis_names, mesh.axis_types, abstract_device=one.abstract_device
    )


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and, if it is laid out over a mesh, sharding of an argument."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = jax.eval_shape(lambda: jax.numpy.asarray(leaf))
    sharding = getattr(leaf, "sharding", None)
    on_mesh = sharding if isinstance(sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_mesh)


def _flat_shapes(args: Sequence[Any], in_shardings: Any) -> list[jax.ShapeDtypeStruct]:
    shapes = [_shape(leaf) for leaf in jax.tree.leaves(tuple(args))]
    if in_shardings is None:
        return shapes
    one_for_all = len(args) == 1 and not isinstance(in_shardings, tuple | list)
    prefix = (in_shardings,) if one_for_all else tuple(in_shardings)
    spread = _spread(prefix, tuple(args), "in_shardings")
    return [
        shape if sharding is None else _laid_out(shape, sharding)
        for shape, sharding in zip(shapes, spread, strict=True)
    ]


def _on_mesh(
    shape: jax.ShapeDtypeStruct, mesh: Mesh | AbstractMesh | None, context: AbstractMesh
) -> jax.ShapeDtypeStruct:
    """The shape with a sharding over the mesh, replicated if it has none."""
    if mesh is None:
        return shape
    if AxisType.Explicit in mesh.axis_types:  # these are compared with the mesh in scope
        mesh = context
    spec = shape.sharding.spec if shape.sharding else PartitionSpec()
    return _laid_out(shape, NamedSharding(mesh, spec))


def _laid_out(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _mesh_of(leaves: Sequence[Any], outputs: Sequence[Any]) -> Mesh | AbstractMesh | None:
    """The mesh of the first argument, or result, that is laid out over one."""
    for sharding in (*(getattr(leaf, "sharding", None) for leaf in leaves), *outputs):
        if isinstance(sharding, NamedSharding):
            return sharding.mesh
    return None


def _spread(prefix: Any, full: Any, name: str) -> list[NamedSharding | None]:
    """One sharding for every leaf of `full`, from a tree that may end earlier."""
    found: list[NamedSharding | None] = []

    def add(sharding: Any, part: Any) -> None:
        if sharding is not None and not isinstance(sharding, NamedSharding):
            raise TypeError(
                f"`{name}` must hold NamedSharding or None, so that it names the mesh; got "
                f"{type(sharding).__name__}."
            )
        found.extend([sharding] * len(jax.tree.leaves(part)))

    jax.tree.map(add, prefix, full, is_leaf=lambda node: node is None)
    return found


def _flat_numbers(args: Sequence[Any], argnums: int | Sequence[int]) -> tuple[int, ...]:
    wanted = {argnums} if isinstance(argnums, int) else set(argnums)
    numbers, start = [], 0
    for position, arg in enumerate(args):
        size = len(jax.tree.leaves(arg))
        if position in wanted:
            numbers += range(start, start + size)
        start += size
    return tuple(numbers)
