"""From the engines that an algorithm asks for to engines: loaded, taken from a checkpoint, a view of another one, or
precomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.checkpoint import Arena, Fingerprint, ResumePoint, TensorCache, cache_home
from surefoot.config import EngineConfig, RunConfig, TokenizerConfig
from surefoot.data.encode import num_ids
from surefoot.data.prepare import Dataset
from surefoot.engine import models
from surefoot.engine.frozen import require_same_frozen
from surefoot.engine.local import LocalEngine
from surefoot.engine.models import LoadedModel
from surefoot.engine.precomputed import Precomputed, Rows
from surefoot.errors import ResumeRefused
from surefoot.types import Cache, DataPlane, Engine, EngineSpec
from surefoot.weights import fingerprint


@dataclass
class EngineBuilder:
    """Makes a run's engines, trained ones first. What an engine is made of, a section of the configuration says.

    Attributes:
        tokenizer: the run's.
        point: where the run goes on from.
        local: engines with a model of their own, made so far.
        tokenizers: of engines that have their own; `check_folders` loads them.
    """

    specs: Mapping[str, EngineSpec]
    config: RunConfig
    tokenizer: Any
    point: ResumePoint
    plane: DataPlane
    local: dict[str, LocalEngine] = field(default_factory=dict)
    tokenizers: dict[str, Any] = field(default_factory=dict)

    def check_folders(self) -> None:
        """What the small files of further models and of the checkpoint tell.

        Raises:
            ModelError: a model cannot be read, or has another tokenizer where it must be the policy's; or an adapter
                does not fit its model.
            ResumeRefused: a model that is not trained was saved in another way than it would go on.
        """
        for name, spec in self.specs.items():
            self._require_saved_alike(name, spec)
            own_section = spec.section != "policy" and self.point.reader is None
            if spec.model is not None or own_section:
                section = self._section(spec)
                models.check_folder(section, spec.kind, f"the model of {name}")
                own = section.model_copy(update={"tokenizer": TokenizerConfig()})
                if spec.own_tokenizer:
                    self.tokenizers[name] = models.load_tokenizer(own)
                elif section.model_name not in (None, self.config.policy.model_name):
                    models.require_same_tokenizer(self.tokenizer, models.load_tokenizer(own), str(own.model_name))
            if spec.trained and self.point.reader is None:
                models.check_adapter(self._section(spec), self.tokenizer, spec.kind)

    def _require_saved_alike(self, name: str, spec: EngineSpec) -> None:
        if self.point.reader is None or spec.trained:
            return
        files = self.point.reader.under(name).files()
        needed = "weights/config.json" if spec.synced else "frozen.json"
        if needed not in files:
            wanted = "follows another model, so its weights are needed" if spec.synced else "stays as it is"
            held = "its fingerprint alone" if "frozen.json" in files else "its weights" if files else "nothing of it"
            raise ResumeRefused(
                f"in this run the {name} {wanted}; the checkpoint holds {held}, for in its run that was otherwise. Put "
                "the old setting back, or start a new run with the checkpoint's policy/weights as model_name"
            )

    def load(self) -> dict[str, LoadedModel]:
        """The models of the trained engines."""
        return {name: self._load(name, spec) for name, spec in self.specs.items() if spec.trained}

    def build(self, loaded: Mapping[str, LoadedModel], optimizer_steps: Mapping[str, int]) -> dict[str, Engine]:
        """All engines by name. Those that are precomputed are empty until `fill`.

        Args:
            optimizer_steps: of each trained engine in the whole run, where that is known.

        Raises:
            ModelError: a model that is to follow another one has other weights than that, by names and shapes.
        """
        for name, model in loaded.items():
            self.local[name] = self._engine(model, self.specs[name], optimizer_steps.get(name))
        engines = {name: self.local.get(name) or self._frozen(name, spec) for name, spec in self.specs.items()}
        for name, spec in self.specs.items():
            if spec.synced:
                followed = engines[spec.base_of].weights()
                models.require_same_shapes(engines[name].weights(), followed, f"the model of {name}", spec.base_of)
        return engines

    def fill(
        self,
        engines: Mapping[str, Engine],
        sets: Sequence[Dataset],
        identity: Mapping[str, Fingerprint],
        progress: Callable[[int, int], None],
    ) -> None:
        """Compute what is to be known before the first step and is in no cache.

        Raises:
            ResumeRefused: the checkpoint was made with another model.
        """
        for name, engine in engines.items():
            if isinstance(engine, Precomputed):
                if self.point.reader is not None:
                    engine.restore(self.point.reader.under(name))
                self._fill(name, engine, sets, identity, progress)

    def _base(self, spec: EngineSpec) -> LocalEngine | None:
        """The trained engine whose model, as it was before training, this one is."""
        return self.local[spec.base_of] if spec.model is None else None

    def _section(self, spec: EngineSpec) -> EngineConfig:
        section = self.config.engine(spec.section)
        if spec.trained:
            return section
        update: dict[str, Any] = {"lora": None}
        if spec.model is not None:
            update |= {"model_name": spec.model, "model_init": None, "tokenizer": TokenizerConfig()}
        if spec.max_length is not None:
            update["max_total_sequence_length"] = spec.max_length
        return section.model_copy(update=update)

    def _load(self, name: str, spec: EngineSpec) -> LoadedModel:
        section = self._section(spec)
        if self.point.reader is None or not (spec.trained or spec.synced):
            tokenizer = self.tokenizers.get(name, self.tokenizer)
            return models.load(section, tokenizer=tokenizer, seed=self.config.seed, kind=spec.kind)
        reader = self.point.reader.under(name)
        return models.load_from_checkpoint(reader, section, self.tokenizer, seed=self.config.seed, kind=spec.kind)

    def _engine(self, loaded: LoadedModel, spec: EngineSpec, total_steps: int | None = None) -> LocalEngine:
        return LocalEngine(
            loaded.model,
            loaded.files,
            self._section(spec),
            self.plane,
            Arena(),
            seed=self.config.seed,
            total_optimizer_steps=total_steps,
            save_optimizer=self.config.checkpointing.save_optimizer,
            trained=spec.trained,
            synced=spec.synced,
            num_ids=num_ids(loaded.tokenizer),
            section=spec.section,
        )

    def _frozen(self, name: str, spec: EngineSpec) -> Engine:
        if spec.precomputed is not None:
            return Precomputed(self._weights_fingerprint(name, spec), spec.precomputed, self.plane)
        base = self._base(spec)
        if base is not None and self.config.policy.lora is not None and not spec.synced:
            return base.base_view()
        self.local[name] = self._engine(self._load(name, spec), spec)
        return self.local[name]

    # --------------------------------------------------------------------------------------------- precomputed outputs

    def _weights_fingerprint(self, name: str, spec: EngineSpec) -> str:
        """Known without loading the model: of its files; or where its weights are drawn, of those that were."""
        of_files = models.weights_fingerprint(self._section(spec))
        if of_files is not None:
            return of_files
        if self.point.reader is not None:
            return str(self.point.reader.under(name).json("frozen.json")["weights"])
        with self._opened(name, spec) as engine:
            return fingerprint(engine.weights())

    @contextmanager
    def _opened(self, name: str, spec: EngineSpec) -> Iterator[Engine]:
        """The frozen model itself, in memory inside the block alone. Before training it is that which is to be trained,
        and under LoRA always the base beneath the adapter."""
        base = self._base(spec)
        if base is not None and self.config.policy.lora is not None:
            yield base.base_view()
        elif base is not None and self.point.reader is None:
            yield base
        else:
            engine = self._engine(self._load(name, spec), spec)
            if self.point.reader is not None and self._section(spec).model_name is None:
                require_same_frozen(self.point.reader.under(name), engine.frozen_fingerprint)
            yield engine

    def _fill(
        self,
        name: str,
        engine: Precomputed,
        sets: Sequence[Dataset],
        identity: Mapping[str, Fingerprint],
        progress: Callable[[int, int], None],
    ) -> None:
        spec = self.specs[name]
        folder = Path(spec.cache) if spec.cache is not None else cache_home() / "surefoot" / f"{name}_logprobs"

        def cache_of(rows: Rows) -> AbstractContextManager[Cache]:
            key = {
                "weights": engine.fingerprint,
                **{part: identity[part].hash for part in ("tokenizer", "chat_template")},
                "data": rows.fingerprint,
                "head": repr(spec.precomputed),
                "precision": self.config.policy.precision,
            }
            return TensorCache(folder, key).held()

        engine.fill(sets, cache_of, lambda: self._opened(name, spec), progress)
