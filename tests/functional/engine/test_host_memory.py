"""Host memory beside weights and cache, planned against what is measured: the ids of tokens and
blocks of running requests, and the tokenizers of structured output.
"""

import gc
import itertools
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from fairlead_runtime.cache.blocks import BlockPool
from fairlead_runtime.grammar.compile import TokenizerFacts
from fairlead_runtime.request.sequence import Request, SamplingParams, pack_ids
from fairlead_runtime.scheduling.plan import Limits, Result
from fairlead_runtime.scheduling.scheduler import Scheduler
from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing import terms
from fairlead_runtime.sizing.groups import group_layers
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.terms import Bookkeeping
from fairlead_runtime.sizing.traffic import WAITING_TOKEN_BYTES, waiting_token_bytes
from support import private_memory

LONGEST, ROWS, VOCABULARY = 16_384, 16, 32_000
# What the scheduler alone has no part in: the ids in the HTTP process, the counts for penalties.
ELSEWHERE = terms.TOKEN_BYTES - 13


@pytest.mark.parametrize("block_size", [4, pytest.param(16, marks=pytest.mark.full), 64])
@pytest.mark.parametrize("windows", [[None], [None, 64]])
def test_sequences_as_long_as_the_cache_stay_inside_the_planned_bookkeeping(
    block_size: int, windows: list[int | None]
) -> None:
    """All of them share one prompt, so each is as long as the whole cache."""
    groups = group_layers(windows)
    blocks = LONGEST // block_size + ROWS * 4
    limits = Limits("fifo", 4096, ROWS, 0.0, block_size, blocks, LONGEST)
    shape = ModelShape.from_config(
        {"model_type": "llama", "max_position_embeddings": LONGEST, "vocab_size": VOCABULARY}
    )
    config = EngineConfig(max_requests=ROWS, max_queue=1, block_size=block_size)
    planned = Bookkeeping.of(shape, config, len(groups), queue=0)
    rng = random.Random(1)
    prompt = pack_ids([rng.randrange(1000, VOCABULARY) for _ in range(LONGEST - 2 * block_size)])
    gc.collect()
    tracemalloc.start()
    scheduler = Scheduler(limits, groups)
    for name in range(ROWS):
        own = pack_ids(prompt)[:]
        scheduler.add(Request(str(name), own, SamplingParams(), block_size))
    tokens = itertools.count(1000)
    while len(scheduler.running) < ROWS or min(s.generated for s in scheduler.running) < 2:
        work = scheduler.commit(scheduler.plan())
        results = {r.sequence.id: Result(next(tokens)) for r in work.rows if r.samples}
        scheduler.update(work, results)
    gc.collect()
    measured, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    here = planned.size(blocks) - ROWS * LONGEST * ELSEWHERE
    assert measured <= here
    assert here <= 2 * measured, "a plan that wastes memory"


def test_a_waiting_request_keeps_only_the_ids_of_its_prompt_and_the_digests_of_its_blocks() -> None:
    scheduler = Scheduler(Limits("fifo", 64, 1, 0.0, 16, 64, 1024), group_layers([None]))
    ids = list(range(1000))
    gc.collect()
    tracemalloc.start()
    for name in range(100):
        waiting = Request(str(name), ids, SamplingParams(n=8), 1)
        scheduler.add(waiting, scheduler.prompt_hashes(waiting))
    measured, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    requests = 100 * 8 * 800  # of the objects of a sequence
    # The ids in the HTTP process are the other half of those.
    of_a_token = waiting_token_bytes(16) - WAITING_TOKEN_BYTES / 2
    assert measured <= 100 * 1000 * of_a_token + requests


@pytest.mark.parametrize("units", [40_000, 44_000])
def test_a_pool_whose_content_has_changed_stays_inside_the_bytes_of_its_units(units: int) -> None:
    """The second size leaves two thirds of the index empty."""
    gc.collect()
    tracemalloc.start()
    pool = BlockPool(units, 1)
    for digest in range(2 * units):
        taken = pool.take(1)
        pool.register(taken[0], 0, digest.to_bytes(32, "little"))
        pool.release(taken)
    gc.collect()
    measured, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert measured <= units * terms.UNIT_BYTES <= 2 * measured


MEASURE = (
    private_memory.PROGRAM
    + """
import sys
from fairlead_runtime.grammar.compile import TokenizerFacts
def build(fast):
    definition = Path(sys.argv[1]).read_text()
    size = int(sys.argv[2])
    return TokenizerFacts(definition, size, (size - 1,)).build(fast=fast)
build(True)  # of the library itself
before = private()
one = build(True)
between = private()
other = build(False)
print(between - before, private() - between)
"""
)


def test_the_tokenizers_of_grammars_stay_inside_their_term(tmp_path: Path) -> None:
    definition = tmp_path / "tokenizer.json"
    tokenizer = _tokenizer()
    definition.write_text(tokenizer.to_str())
    assert TokenizerFacts.of(tokenizer, VOCABULARY, [1]) is not None
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(definition), str(VOCABULARY)],
        check=True,
        capture_output=True,
        text=True,
    )
    fast, small = map(int, run.stdout.split())
    planned = VOCABULARY * terms.GRAMMAR_ID_BYTES
    assert small < fast, "the child's is the smaller one"
    assert fast + small <= planned <= 2 * (fast + small)


def _tokenizer() -> Tokenizer:
    """Of tokens somewhat longer than those of a real vocabulary, which take more memory."""
    rng = random.Random(1)
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocabulary, merges = {letter: i for i, letter in enumerate(letters)}, []
    halves = [*letters]  # of up to five letters: a token has up to ten
    while len(vocabulary) < VOCABULARY:
        pair = rng.choice(halves), rng.choice(halves)
        token = "".join(pair)
        if token not in vocabulary:
            vocabulary[token] = len(vocabulary)
            merges.append(pair)
            if len(token) <= 5:
                halves.append(token)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
