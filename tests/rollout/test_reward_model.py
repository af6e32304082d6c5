"""A reward model as a reward, on a real tiny model: its scores are those of Transformers alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from surefoot.config import DataConfig, DatasetConfig
from surefoot.data.encode import Encoder
from surefoot.data_plane.memory import MemoryPlane
from surefoot.engine import models
from surefoot.engine.local import LocalEngine
from surefoot.rollout.reward_model import RewardModel
from surefoot.rollout.rewards import RewardConfig, Scored, load_rewards
from tests.engine import tiny
from tests.helpers.memory_store import CloningStager


@pytest.fixture
def made(tmp_path: Path) -> tuple[RewardModel, Any, MemoryPlane]:
    """The reward, the same model as Transformers has it, and the columns."""
    config = tiny.config(tmp_path)
    tokenizer = models.load_tokenizer(config)
    loaded = models.load(config, tokenizer=tokenizer, seed=7, kind="scalar")
    loaded.model.save_pretrained(tmp_path / "rm")
    plane = MemoryPlane()
    engine = LocalEngine(loaded.model, loaded.files, config, plane, CloningStager(), seed=7, trained=False)
    encoder = Encoder(tokenizer, DataConfig(train=DatasetConfig(path="-")), config.max_total_sequence_length)
    bare = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    return RewardModel(engine, plane, encoder), (bare, tokenizer), plane


def test_chats_and_texts_have_the_models_own_scores(made: tuple[RewardModel, Any, MemoryPlane]) -> None:
    reward, (bare, tokenizer), plane = made
    chats = [
        ([{"role": "user", "content": "w1 w2"}], [{"role": "assistant", "content": said}])
        for said in ("w3", "w4 w5 w6", "")
    ]
    rows = [Scored(f"r{i}", prompt, said) for i, (prompt, said) in enumerate(chats)]
    with load_rewards([RewardConfig(model="rm", weight=2.0)], models={"rm": reward}) as rewards:
        found = asyncio.run(rewards.score([*rows, Scored("r3", "w1 w2 ", "w3")]))
    texts = [tokenizer.apply_chat_template(prompt + said, tokenize=False).strip() for prompt, said in chats]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    ids.append([*tokenizer.encode("w1 w2 w3"), tokenizer.eos_token_id])
    with torch.no_grad():
        expected = [float(bare(input_ids=torch.tensor([row])).logits) for row in ids]
    assert found.values["reward_model"] == pytest.approx(expected, abs=1e-6)
    assert found.total == pytest.approx([2 * score for score in expected], abs=1e-5)
    assert len(set(expected)) == 4 and len(plane) == 0


def test_a_row_that_cannot_be_encoded_abstains(made: tuple[RewardModel, Any, MemoryPlane]) -> None:
    reward, _, plane = made
    tool_only = [{"role": "tool", "content": "w3"}]
    rows = [Scored("r0", "w1", "w2"), Scored("r1", [{"role": "user", "content": "w1"}], tool_only)]
    with load_rewards([RewardConfig(model="rm")], models={"rm": reward}) as rewards:
        found = asyncio.run(rewards.score(rows))
    assert found.values["reward_model"][1] is None and found.failures == {"reward_model": 1}
    assert found.values["reward_model"][0] is not None and len(plane) == 0
