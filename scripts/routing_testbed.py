"""Is the routing any good? Four kinds of text, and a reference router that knows the kind.

    python -m scripts.routing_testbed --out runs/routing_testbed.json

Trains a small model to fill in masked tokens of English prose, Python, C++ and names of characters:
dense, with the reference router, and with each router under each scope of balancing. Prints which
share of the reference's gain over the dense model each router reaches. A sequence has one kind. After
an interruption the same command continues; all runs take half an hour of one core.

Source:
    The MoE Routing Testbed (April 2026): distinguishable kinds of text, a reference router as the upper bound, and the
    scope of balancing. Differs: convolutions instead of attention, which learn to see neighbours at once.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import json
import math
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import BaseModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm

from eval.reports.formatting import markdown_table
from eval.studies.seeds import paired_difference
from moe import SparseConfig, SparseFeedForward
from moe.cli import CONTINUES, Parser, integer, run_main
from moe.data.docstrings import docstrings, package_folder, python_files
from moe.data.prose import prose_paragraphs
from moe.errors import ConfigError
from moe.files import output_path, write_text
from moe.parsing import read_record
from moe.sparse.layer import RouterOutput
from moe.sparse.routers.bias_balanced import BiasBalancedRouter
from moe.sparse.routers.hash_by_token import hash_expert

VOCAB_SIZE = 1_024
CHARACTERS = 1_500_000
"""Most characters of a kind."""
LENGTH = 32
BATCH = 64
"""Sequences of an update, as many of each kind."""
EVALUATION_BATCHES = 32
MASKED = 0.25
MASK_ID = 0

WIDTH = 64
HIDDEN = 128
NUM_EXPERTS = 4
BALANCE_WEIGHT = 0.01
Z_WEIGHT = 0.001
RATE = 3e-3

SCOPES: dict[str, dict[str, Any]] = {
    "sequence": {"capacity_scope": "sequence"},
    "4 sequences": {"group_size": 4 * LENGTH},
    "batch": {"group_size": BATCH * LENGTH},
}
"""Tokens that are balanced together, and compete for capacity where there is one."""

HEADER = (
    "router",
    "balanced over",
    "loss, nats",
    "gain over dense",
    "share of the reference's, %",
    "kind, %",
)


class Arm(NamedTuple):
    """A model to train.

    Attributes:
        router: Name in the table.
        scope: Name in SCOPES; "-" where nothing depends on it.
        settings: Settings of the sparse layer.
        knows_kind: Whether the router gets the kinds of the tokens in place of their ids.
    """

    router: str
    scope: str
    settings: dict[str, Any]
    knows_kind: bool = False

    @property
    def name(self) -> str:
        """Key in the file of results."""
        return f"{self.router} / {self.scope}"


class Run(BaseModel, frozen=True):
    """A trained model.

    Attributes:
        loss: Nats for each masked token of held-out text.
        information: Share of the entropy of the kind that the chosen expert tells, in [0, 1].
    """

    loss: float
    information: float


class Results(BaseModel):
    """The file of results: the runs of each arm, with seeds 0, 1 and so on."""

    updates: int
    runs: dict[str, list[Run]] = {}


def main(argv: list[str]) -> None:
    """Trains every arm with every seed, writes the results and prints their table."""
    parser = Parser(prog="python -m scripts.routing_testbed", description="Compares routers.")
    parser.add_argument("--updates", type=integer(least=1), default=1_000, help="updates (1000)")
    parser.add_argument("--seeds", type=integer(least=1, most=100), default=3, help="seeds (3)")
    parser.add_argument(
        "--out",
        default="runs/routing_testbed.json",
        help="the .json file of results (runs/routing_testbed.json)",
    )
    options = parser.parse_args(argv)

    out = output_path(options.out, suffix=".json")
    results = Results(updates=options.updates)
    if out.exists():
        results = read_record(out, Results, advice="Choose another --out.")
        if results.updates != options.updates:
            raise ConfigError(
                f"{out} has runs of {results.updates} updates, but --updates is {options.updates}. Choose "
                "another --out."
            )
    texts = tokenize_kinds()
    arms = all_arms()
    with tqdm(total=options.seeds * len(arms), unit="run") as bar:
        for seed in range(options.seeds):
            for arm in arms:
                of_arm = results.runs.setdefault(arm.name, [])
                if len(of_arm) == seed:
                    bar.set_description(f"{arm.name}, seed {seed}")
                    of_arm.append(train(arm, texts, seed, results.updates))
                    write_text(out, json.dumps(results.model_dump(), indent=1) + "\n")
                bar.update()
    print(*markdown_table(HEADER, table_rows(arms, results)), sep="\n")


def all_arms() -> list[Arm]:
    """Returns the dense model, the reference, and every router under every scope that matters for it."""
    dropless = {"capacity_factor": None, "eval_capacity_factor": None}
    limited = {"capacity_factor": 1.25, "eval_capacity_factor": 1.25}
    arms = [
        Arm("dense", "-", {"num_experts": 1, **dropless}),
        Arm("reference", "-", {"router": "hash", **dropless}, knows_kind=True),
        Arm("hash", "-", {"router": "hash", **dropless}),
        Arm("bias_balanced", "-", {"router": "bias_balanced", **dropless}),
    ]

    # Without a capacity, batch_prioritized and no_token_left_behind would be token_choice.
    capacities = {
        "token_choice": dropless,
        "switch": dropless,
        "batch_prioritized": limited,
        "no_token_left_behind": limited,
        "expert_choice": {"capacity_factor": 1.0, "eval_capacity_factor": 1.0},
    }
    for router, capacity in capacities.items():
        for scope, grouping in SCOPES.items():
            arms.append(Arm(router, scope, {"router": router, **capacity, **grouping}))
    return arms


# ---------------------------------------------------------------------------
# Text


class Texts(NamedTuple):
    """Sequences of every kind: <int64>[kinds, sequences, L] to train on, and held out."""

    train: Tensor
    held_out: Tensor


def tokenize_kinds() -> Texts:
    """Returns the texts in a common byte-pair vocabulary; the last tenth of each is held out."""
    ascii_only = normalizers.Replace(r"[^ -~]", "?")
    texts: list[str] = []
    for pieces in texts_by_kind().values():
        text = " ".join(" ".join(pieces).split())[:CHARACTERS]
        texts.append(ascii_only.normalize_str(text))

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<mask>"], show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)

    # As many sequences of each kind as the shortest has.
    kinds: list[Tensor] = []
    for text in texts:
        ids = torch.tensor(bpe.encode(text).ids)
        whole = len(ids) // LENGTH * LENGTH
        kinds.append(rearrange(ids[:whole], "(n l) -> n l", l=LENGTH))
    num_sequences = min(map(len, kinds))
    sequences = torch.stack([kind[:num_sequences] for kind in kinds])
    num_train = num_sequences * 9 // 10
    return Texts(sequences[:, :num_train], sequences[:, num_train:])


def texts_by_kind() -> dict[str, Iterable[str]]:
    """Returns the texts of each kind, all of them in every installation."""
    files = python_files(package_folder("stdlib"))
    headers = sorted((package_folder("torch") / "include" / "ATen").rglob("*.h"))
    names = (unicodedata.name(chr(code), "") for code in range(0x20000))
    return {
        "prose": (" ".join(prose_paragraphs(text)) for file in files for text in docstrings(file)),
        "python": (file.read_text("utf-8", errors="replace") for file in files),
        "c++": (header.read_text("utf-8", errors="replace") for header in headers),
        "names": (name.lower() for name in names if not name.startswith(("CJK", "HANGUL"))),
    }


class TestbedBatch(NamedTuple):
    """<int64>[B, L] tokens with masks, <int64>[B, L] the original tokens, <bool>[B, L] masked, <int64>[B] kinds."""

    tokens: Tensor
    targets: Tensor
    is_masked: Tensor
    kind: Tensor


def draw_batches(sequences: Tensor, num_batches: int, seed: int) -> Iterator[TestbedBatch]:
    """Yields batches of random sequences <int64>[kinds, sequences, L], as many of each kind."""
    random = np.random.default_rng(seed)
    num_kinds, num_sequences, _ = sequences.shape
    kind = torch.arange(BATCH) % num_kinds
    for _ in range(num_batches):
        chosen = torch.from_numpy(random.integers(num_sequences, size=BATCH))
        targets = sequences[kind, chosen]
        is_masked = torch.from_numpy(random.random(targets.shape) < MASKED)
        yield TestbedBatch(targets.masked_fill(is_masked, MASK_ID), targets, is_masked, kind)


# ---------------------------------------------------------------------------
# Model and training


class TestbedModel(nn.Module):
    """Convolution and dense layer, convolution and sparse layer, each with a residual path."""

    def __init__(self, arm: Arm) -> None:
        super().__init__()
        common = {"d_model": WIDTH, "d_ff": HIDDEN, "num_selected_experts": 1}
        config = SparseConfig(**{**common, "num_experts": NUM_EXPERTS, **arm.settings})
        self.knows_kind = arm.knows_kind
        self.embedding = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(WIDTH, WIDTH, kernel_size=5, padding=2) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(5))
        self.dense = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        self.sparse = SparseFeedForward(config)
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, batch: TestbedBatch) -> tuple[Tensor, RouterOutput]:
        """Returns the logits <float32>[masked, V], and the router's results."""
        x = self.embedding(batch.tokens)  # [B, L, D]
        x = x + self._mix(0, x)
        x = x + self.dense(self.norms[2](x))
        x = x + self._mix(1, x)
        ids = kind_ids(batch) if self.knows_kind else batch.tokens
        y, router = self.sparse(self.norms[3](x), token_ids=ids)
        assert router is not None, "the layer reports"
        return self.head(self.norms[4](x + y)[batch.is_masked]), router

    def _mix(self, number: int, x: Tensor) -> Tensor:
        """Returns what each token sees of its neighbours."""
        seen = rearrange(self.norms[number](x), "b l d -> b d l")
        return rearrange(self.convolutions[number](seen), "b d l -> b l d")


def kind_ids(batch: TestbedBatch) -> Tensor:
    """Returns <int64>[B, L] an id for each token by its kind alone, which `hash` sends to an expert of its own."""
    return _id_by_expert()[batch.kind][:, None].expand_as(batch.tokens)


@cache
def _id_by_expert() -> Tensor:
    """Returns <int64>[E] the first id that `hash` sends to each expert."""
    ids = torch.arange(1_000)
    experts = hash_expert(ids, NUM_EXPERTS, seed=0)
    return torch.stack([ids[experts == expert][0] for expert in range(NUM_EXPERTS)])


def train(arm: Arm, texts: Texts, seed: int, updates: int) -> Run:
    """Returns the results of a model; with the same seed, all arms see the same batches."""
    torch.manual_seed(seed)
    model = TestbedModel(arm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / updates)
    for batch in draw_batches(texts.train, updates, seed):
        logits, router = model(batch)
        loss = F.cross_entropy(logits, batch.targets[batch.is_masked])
        losses = router.losses
        loss = loss + BALANCE_WEIGHT * losses.load_balance_loss + Z_WEIGHT * losses.router_z_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if isinstance(model.sparse.router, BiasBalancedRouter):
            model.sparse.router.update(router.stats)
    return evaluate(model, texts.held_out)


@torch.no_grad()
def evaluate(model: TestbedModel, sequences: Tensor) -> Run:
    """Returns the results on held-out sequences, the same for every model."""
    model.eval()
    loss = 0.0
    num_targets = 0
    tokens_by_kind = torch.zeros(NUM_EXPERTS, NUM_EXPERTS)  # [kinds, E]
    for batch in draw_batches(sequences, EVALUATION_BATCHES, seed=1_000_000):
        logits, router = model(batch)
        targets = batch.targets[batch.is_masked]
        loss += float(F.cross_entropy(logits, targets, reduction="sum"))
        num_targets += len(targets)

        # Groups hold whole sequences in order.
        plan = router.plan
        experts = F.one_hot(plan.expert_index, NUM_EXPERTS) * plan.accepted[..., None]
        by_token = rearrange(experts, "g s k e -> (g s) k e").sum(1).float()  # [B L, E]
        kinds = batch.kind.repeat_interleave(LENGTH)
        tokens_by_kind.index_add_(0, kinds, by_token)
    return Run(loss=loss / num_targets, information=shared_information(tokens_by_kind))


def shared_information(counts: Tensor) -> float:
    """Returns the mutual information of kind and expert <float32>[kinds, E], over the entropy of the kind."""
    joint = counts.double() / counts.sum()
    independent = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
    information = torch.xlogy(joint, joint / independent.clamp_min(1e-30)).sum()
    return float(information) / math.log(len(counts))


# ---------------------------------------------------------------------------
# Table


def table_rows(arms: Sequence[Arm], results: Results) -> list[list[str]]:
    """Returns a row for each arm: means over the seeds, with 95 % t-intervals."""
    num_seeds = min(map(len, results.runs.values()))

    def losses(name: str) -> list[float]:
        return [run.loss for run in results.runs[name][:num_seeds]]

    dense = losses("dense / -")
    reference = losses("reference / -")
    rows: list[list[str]] = []
    for arm in arms:
        of_arm = losses(arm.name)
        gain = paired_difference(dense, of_arm)
        shares = []
        for of_dense, of_reference, loss in zip(dense, reference, of_arm, strict=True):
            shares.append(100 * (of_dense - loss) / (of_dense - of_reference))
        share = paired_difference(shares, [0.0] * len(shares))
        information = np.mean([run.information for run in results.runs[arm.name][:num_seeds]])
        rows.append(
            [
                arm.router,
                arm.scope,
                f"{np.mean(of_arm):.3f}",
                f"{gain:+.3f}",
                f"{share:.0f}",
                f"{100 * information:.0f}",
            ]
        )
    return rows


if __name__ == "__main__":
    run_main(main, interrupted=CONTINUES)
