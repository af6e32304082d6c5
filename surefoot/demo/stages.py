"""What the demo trains. A stage is one run on the task, measured before and after; another method joins by one more
`Stage` here, in `FURTHER`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from surefoot.demo import measure, task
from surefoot.demo.closing import Outcome
from surefoot.demo.measure import GREEDY, GUESSES, SAMPLED, SLIPS, Heldout, Kind
from surefoot.demo.recipe import PAIR, PROMPT, Recipe, weights
from surefoot.demo.watch import WatchedRun
from surefoot.report.text import number

WRONG_SHARE = 0.6


class Limit(NamedTuple):
    """What a share must be after training, and by how much above that from before, if that is asked."""

    least: float = 0.0
    most: float = 1.0
    gain: float | None = None

    def holds(self, before: float, after: float) -> bool:
        return self.least <= after <= self.most and (self.gain is None or after - before >= self.gain)

    def __str__(self) -> str:
        """
        >>> print(Limit(0.9), Limit(0.1, 0.4), Limit(0.8, gain=0.4), sep="; ")
        at least 90%; 10% to 40%; at least 80%, and 40 points up
        """
        text = f"at least {self.least:.0%}" if self.most == 1 else f"{self.least:.0%} to {self.most:.0%}"
        return text + (f", and {100 * self.gain:.0f} points up" if self.gain else "")


@dataclass(frozen=True)
class Stage:
    """One run.

    Attributes:
        about: what it is, in a line for the terminal.
        kind: of the model.
        measure: shares by name, of a model, its tokenizer and what is held out.
        limits: of these shares, by the same names.
        validated: metrics of the run's last validation, each with what it must be above.
    """

    recipe: Recipe
    about: str
    measure: Callable[[Any, Any, Heldout], Mapping[str, float]]
    limits: Mapping[str, Limit]
    kind: Kind = "causal_lm"
    validated: Mapping[str, float] = field(default_factory=dict)

    def outcomes(self, before: Mapping[str, float], after: Mapping[str, float], run: WatchedRun) -> list[Outcome]:
        """Every share that was measured, and the metrics of the run's last validation."""
        name = self.recipe.name
        shares = [
            Outcome(
                name,
                what,
                f"{before[what]:.1%}",
                f"{after[what]:.1%}",
                str(limit),
                limit.holds(before[what], after[what]),
            )
            for what, limit in self.limits.items()
        ]
        last = {metric: run.values("val", metric)[-1] for metric in self.validated}
        return shares + [
            Outcome(name, metric, "", number(last[metric]), f"above {least:g}", last[metric] > least)
            for metric, least in self.validated.items()
        ]


SFT = Stage(
    Recipe(
        "sft",
        f"Supervised fine-tuning of a small Llama, from random weights, on demonstrations of sums such as 47+85=132. "
        f"{WRONG_SHARE:.0%} of them are wrong, each by a slip in a column or two: who imitates them well, is wrong as "
        "often as they are.",
        num_steps=800,
        period=100,
        rows=32,
        lr="1.5e-3",
        train="demonstrations",
        algorithm="sft",
    ),
    f"fine-tuning from random weights on demonstrations of which {WRONG_SHARE:.0%} are wrong",
    measure.answers,
    {SAMPLED: Limit(0.1, 0.4), GREEDY: Limit(0.5)},
)
_SAMPLING = """\

generation: { max_new_tokens: 4 }  # three digits and the end of the turn

rewards:
  - { name: exact_match }  # 1 for the very digits, else 0
"""
_rewarded = partial(Recipe, rows=64, val_rows=200, one_line=PROMPT, metric="reward", higher_is_better=True)
on_prompts = partial(_rewarded, period=25, decay="linear", warmup=20, train="train", begins_with=SFT.recipe)
_GRPO = """\
grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 8  # each is judged against the others of its prompt; 256 rows, 4 optimizer steps
"""
GRPO = Stage(
    on_prompts(
        "grpo",
        "GRPO from the model that learnt from mostly wrong demonstrations. It sees no demonstration any more, only "
        "whether what it says is right, and so learns past its teachers.",
        algorithm="grpo",
        section=_GRPO + _SAMPLING,
        num_steps=400,
        lr="4e-4",
    ),
    "GRPO from there, with no demonstrations and a reward for right answers; twice, and one of the two is killed",
    measure.answers,
    {SAMPLED: Limit(0.85, gain=0.4), GREEDY: Limit(0.92)},
)
on_pairs = partial(
    Recipe, rows=64, val_rows=task.NUM_HELDOUT, one_line=PAIR, higher_is_better=True, begins_with=SFT.recipe
)
RM = Stage(
    on_pairs(
        "rm",
        "A reward model (Bradley-Terry): the model that learnt from mostly wrong demonstrations gets a score head in "
        "place of its language-model head, and learns to score the right sum above any other number. Slips are harder "
        "to see than such guesses: from pairs of slips alone some runs had learnt nothing after 600 steps.",
        algorithm="rm",
        num_steps=800,
        period=100,
        lr="6e-4",
        train="guesses",
        heldout="guesses_heldout",
        metric="accuracy",
    ),
    "a reward model from the SFT model: right sums against guesses",
    measure.scores,
    {GUESSES: Limit(0.9, gain=0.3), SLIPS: Limit(0.6)},
    kind="scalar",
)
_DPO = """\
dpo:
  # `sigmoid` is DPO itself: it tells right from wrong. Alone it does so by making both less likely, the wrong one more,
  # so that answers never seen gain: here sampled answers then got better, and the most likely ones worse. `sft` keeps
  # the right answer likely.
  losses:
    - { name: sigmoid, beta: 0.3 }
    - { name: sft }
"""
DPO = Stage(
    on_pairs(
        "dpo",
        "Direct preference optimisation of the model that learnt from mostly wrong demonstrations: right sums against "
        "slips of the kind that it was shown.",
        algorithm="dpo",
        section=_DPO,
        num_steps=400,
        period=100,
        lr="5e-4",
        train="slips",
        heldout="slips_heldout",
        metric="rewards/accuracies",
    ),
    "DPO from the SFT model: right sums against slips",
    measure.answers,
    {SAMPLED: Limit(0.6, gain=0.4), GREEDY: Limit(0.9)},
    validated={"rewards/accuracies": 0.9, "rewards/margins": 0.0},
)
_PPO = """\
ppo:
  num_prompts_per_step: 256  # one completion each: what was to be expected says the value model, not the siblings
  gae_lambda: 1.0  # answers are short
  critic_warmup_steps: 10  # in which the value model alone learns

value: { optimizer: { lr: 1.0e-3 } }  # what is left out is the policy's
"""
PPO = Stage(
    on_prompts(
        "ppo",
        "PPO from the model that learnt from mostly wrong demonstrations: the same rewards as for GRPO, judged against "
        "what a value model had expected, which is trained beside the policy.",
        algorithm="ppo",
        section=_PPO + _SAMPLING,
        num_steps=200,
        lr="4e-4",
    ),
    "PPO from the SFT model: right answers are rewarded, and a value model says what was to be expected",
    measure.answers,
    {SAMPLED: Limit(0.7, gain=0.4), GREEDY: Limit(0.9)},
)
into_a_student = partial(_rewarded, lr="5e-3", model_init=task.model_init(hidden_size=64))
_TEACHER = f'teachers: [{{ model: "{weights(Path("$root/killed"), GRPO.recipe.num_steps)}" }}]'
_DISTILLATION = f"""\
distillation:
  {_TEACHER}
  divergence: forward_kl
  num_prompts_per_step: 256
  num_epochs_per_step: 2  # 8 optimizer steps
"""
DISTILLATION = Stage(
    into_a_student(
        "distillation",
        "On-policy distillation of the model that GRPO trained into one of a quarter of its size, from random weights. "
        "Nobody shows the student an answer: it writes, nonsense at first, and at each of its tokens the teacher says "
        "which one it would have written.",
        algorithm="distillation",
        num_steps=100,
        period=25,
        section=_DISTILLATION + _SAMPLING,
        train="train",
    ),
    "the GRPO model as teacher of a smaller one, from random weights, on the student's own answers",
    measure.answers,
    {SAMPLED: Limit(0.8), GREEDY: Limit(0.9)},
)
_CROSS = f"""\
cross_tokenizer:
  {_TEACHER}
  loss: gold
  top_k: null  # all 19 tokens of the teacher's
  student_fraction: 0.75  # of the prompts; the others come with the demonstrations' answers, which are mostly wrong. So
  # the reward, which is measured by these answers in training, stays low; in validation it is measured by right ones
  num_prompts_per_step: 256
  num_epochs_per_step: 2  # 8 optimizer steps
"""
CROSS_TOKENIZER = Stage(
    into_a_student(
        "cross_tokenizer",
        "Distillation of the same teacher into a student with another tokenizer, whose 132 is one token. Nobody shows "
        "it right answers: the demonstrations are the mostly wrong ones of the beginning, and what the teacher says of "
        "each of their tokens is right.",
        algorithm="cross_tokenizer",
        num_steps=80,
        period=20,
        section=_CROSS + _SAMPLING,
        train="demonstrations",
        tokenizer="other_tokenizer",
        # Tied to the outputs, embeddings have to learn first which of the hundred tokens are not to be written, and
        # one run had learnt no more by its end.
        model_init=task.model_init(hidden_size=64) | {"tie_word_embeddings": False},
    ),
    "the GRPO model as teacher of a smaller one with another tokenizer, from random weights",
    measure.answers,
    {SAMPLED: Limit(0.8), GREEDY: Limit(0.9)},
)
# What `--all` goes on with: from SFT's weights, then with what GRPO ended with as teacher. Stages of one group run side
# by side, on one thread each.
FURTHER = ((RM, DPO), (PPO,), (DISTILLATION, CROSS_TOKENIZER))
STAGES = (SFT, GRPO, *(stage for group in FURTHER for stage in group))
