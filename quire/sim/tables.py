"""Tables of step times by name, that come with the package, or from files of `quire bench costs`.

The shapes of the shipped ones are known; of a file's model the shape is a folder with its config.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from quire.bench.shapes import SHAPES
from quire.errors import BadRequest
from quire.jsonfile import read_object
from quire.models.registry import spec_of
from quire.models.spec import ModelSpec
from quire.sched.cost_table import CostTable
from quire.sim.devices import DEVICES, Device, device_named
from quire.sim.engine import SimEngine
from quire.sim.estimate import Estimate, Layout
from quire.sim.room import pages_that_fit
from quire.sim.scaling import estimated, scaled

ROOFLINE = "roofline"  # in place of a table: there is none
FOLDER = Path(__file__).parent / "published"


def shipped_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def table_named(name: str) -> CostTable:
    """A shipped table, or a file."""
    if name in shipped_names():
        return CostTable.read(FOLDER / f"{name}.json")
    path = Path(name)
    if not path.exists() and path.suffix != ".json":
        raise BadRequest(
            f"got costs {name!r}, which is no file and none of {', '.join(shipped_names())};"
            " 'quire bench costs --out FILE' measures this machine"
        )
    return CostTable.read(path)


def shape_named(name: str) -> ModelSpec:
    """Of a well-known shape, or of a folder with a config."""
    if name in SHAPES:
        return spec_of(SHAPES[name])
    path = Path(name)
    if not path.is_dir():
        raise BadRequest(
            f"got shape {name!r}, want a folder with a config.json or one of {', '.join(SHAPES)}"
        )
    return spec_of(read_object(path / "config.json"))


@dataclass(frozen=True, slots=True)
class Source:
    """What step times are made from: a table, or a model's shape alone."""

    name: str  # of the model
    table: CostTable | None
    spec: ModelSpec | None
    was: Estimate | None  # of what the table was measured on

    @staticmethod
    def of(name: str, shape: str | None, device: str | None) -> Source:
        """`shape`: of the model, where the table does not name one that is known; else of the one
        that it is scaled to. `device`: of the table, where it does not name one that is known."""
        spec = shape_named(shape) if shape else None
        if name == ROOFLINE:
            if spec is None or shape is None:
                raise BadRequest(f"got costs {ROOFLINE!r} and no shape; give --shape FOLDER")
            return Source(
                shape, None, spec, Estimate(spec, device_named(device)) if device else None
            )
        table = table_named(name)
        facts = table.engine
        own = shape_named(facts.model) if facts.model in SHAPES else spec
        if device is None and facts.device in DEVICES:
            device = facts.device
        was = Estimate(own, device_named(device)) if own and device else None
        return Source(_model(facts.model, shape), table, spec or own, was)

    @property
    def device(self) -> Device | None:
        """That it is of, as it stands."""
        return self.was.device if self.was else None

    def on(self, device: Device | None, layout: Layout) -> CostTable:
        """Step times on these devices; None: on what the table is of. Pages are not counted."""
        is_as_it_stands = device is None and layout.num_devices == 1
        if self.table is not None and is_as_it_stands and self.name == self.table.engine.model:
            return self.table
        if self.spec is None:
            raise BadRequest(
                f"to scale the table of {self.name} its model's shape must be known; give --shape"
                " FOLDER, with the model's config.json"
            )
        device = device or self.device
        if device is None or (self.table is not None and self.was is None):
            of = self.table.engine.device if self.table else "no device"
            raise BadRequest(
                f"to scale a table of {of!r} it must be known what that is: name it with"
                f" --table-device, or --device for a roofline; known: {', '.join(DEVICES)}"
            )
        if self.table is None or self.was is None:
            return estimated(self.spec, self.name, device, layout)
        return scaled(self.table, self.was, Estimate(self.spec, device, layout), self.name)

    def sized(self, engine: SimEngine, device: Device | None, layout: Layout) -> SimEngine:
        """With the pages that the devices' memory leaves. Raises OutOfMemory."""
        device = device or self.device
        assert self.spec is not None and device is not None
        page_size = engine.costs.engine.page_size
        found = pages_that_fit(Estimate(self.spec, device, layout), engine.sched, page_size)
        return replace(engine, num_pages=found)


def _model(own: str, shape: str | None) -> str:
    """What a table is of after `shape` was given."""
    return shape if shape and own in SHAPES else own
