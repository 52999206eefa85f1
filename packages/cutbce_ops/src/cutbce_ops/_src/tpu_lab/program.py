"""A Python function as a program that another process can compile for a slice."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

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
    leaves, tree = jax.tree.flatten(tuple(args))
    shapes = [_shape(leaf) for leaf in leaves]
    if in_shardings is not None:
        one_for_all = len(args) == 1 and not isinstance(in_shardings, tuple | list)
        prefix = (in_shardings,) if one_for_all else tuple(in_shardings)
        spread = _spread(prefix, tuple(args), "in_shardings")
        shapes = [_laid_out(*pair) for pair in zip(shapes, spread, strict=True)]
    mesh = mesh or _mesh_of(shapes, jax.tree.leaves(out_shardings))
    if mesh is not None:
        replicated = NamedSharding(mesh, PartitionSpec())
        shapes = [one if one.sharding else _laid_out(one, replicated) for one in shapes]

    def flat(*arrays: Any) -> tuple[Any, ...]:
        return tuple(jax.tree.leaves(fn(*jax.tree.unflatten(tree, arrays))))

    donated = _flat_numbers(args, donate_argnums)
    options: dict[str, Any] = {"donate_argnums": donated}
    if out_shardings is not None:
        outputs = jax.eval_shape(fn, *jax.tree.unflatten(tree, shapes))
        spread = _spread(out_shardings, outputs, "out_shardings")
        options["out_shardings"] = tuple(spread)
    exported = _export(jax.jit(flat, **options), topology, shapes, mesh)
    if exported.nr_devices > 1 and mesh is None:
        raise ValueError(
            f"The program runs on {exported.nr_devices} devices, but no argument says on which: "
            "give `mesh` or a sharding to `compile_for`."
        )
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


def _export(
    jitted: Any, topology: str, shapes: Sequence[Any], mesh: Mesh | AbstractMesh | None
) -> Any:
    from jax import export

    def run(checks: Sequence[Any]) -> Any:
        exporter = export.export(jitted, platforms=["tpu"], disabled_checks=checks)
        # Some Pallas operations ask the mesh in scope for the chip.
        with jax.sharding.use_abstract_mesh(_with_chip(topology, mesh)):
            return exporter(*shapes)

    try:
        return run(())
    except ValueError as error:
        # The same JAX reads it right away, so nothing has to stay compatible.
        names = re.findall(r"'([\w.$]+)'", str(error)) if "compatibility" in str(error) else []
        if not names:
            raise
        return run([export.DisabledSafetyCheck.custom_call(name) for name in names])


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


def _laid_out(shape: jax.ShapeDtypeStruct, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
    if sharding is None:
        return shape
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
