"""Steps of the whole model on one device against what the device can do: `python -m benchmarks.end_to_end`.

Weights are random and made on the device (`benchmarks.random_model`), so that `--preset v4.1-flash-96e` needs no
checkpoint. Every cell plans its steps as the scheduler does and runs them through `ModelRunner`:

* decode: `--batches` requests of `--contexts` tokens each, every one with pages of its own;
* prefill: one prompt of `--prompts` tokens in chunks of `--chunk`, decoder replay on.

With `--drafts` a decode step verifies that many proposals a request and drafts the next ones. Random weights accept
next to none, so that tokens per second are those of the worst draft; the bound is that of the verification alone.

All programs are compiled first, several at a time, and a first JSON line says how long it took. Then one line a cell:
seconds of a step (the device's and the host's part, in a queue of steps and alone), tokens per second, the bound of the
step (bytes and operations counted by `v41jax.plan_work` over the copy and matrix rates measured in the same run) and
the fraction reached. `--host-events` adds what the host did in a step, by JAX's annotations; give a GPU
`XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true` with it, or its captured graphs are not used. At last,
where the device reports its kernels, another line a cell: `kernel_ms` is their sum, without copies of memory, which are
no kernels, and `largest_kernels` says which took how long. Asking for them ends the use of captured graphs, which is
why it is done last.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import ProfileData, ProfileOptions

from benchmarks.provenance import provenance
from benchmarks.random_model import random_draft, random_parameters, random_pools
from benchmarks.timing import Ceilings, launched_kernels, measure_ceilings
from scheduler.batch import BatchStep, EngramRows, Preparation
from scheduler.batch_builder import build_batch_step
from scheduler.buckets import Buckets, StepShape, prefill_token_ladder
from scheduler.model_view import ModelView
from scheduler.pool_geometry import V41PoolGeometry
from scheduler.runtime_config import EngineConfig, validate_runtime_config
from scheduler.scheduled_batch import Phase, ScheduledBatch
from scheduler.sequence import SamplingParams
from scheduler.states import StateMaintenanceOps
from v41jax.config import ModelConfig
from v41jax.draft_runner import DraftRunner
from v41jax.held_weights import arranges_experts
from v41jax.layers.collectives import Parallel
from v41jax.model import ModelSetup
from v41jax.parameters import WeightForm
from v41jax.plan_work import Rows, Work, least_work
from v41jax.precision import Precision
from v41jax.presets import preset
from v41jax.runner import ModelRunner, SamplingRow, sampled_rows, sampling_inputs

SECONDS_A_CELL = 2.0
"""Steps are repeated for about this long."""
MOST_STEPS = 300
"""Steps of a measurement at most."""
KERNELS_LISTED = 40
"""Names in `largest_kernels`."""


@dataclasses.dataclass
class Bench:
    """A model on the device and what its steps are measured against.

    Attributes:
      config: of the model.
      runner: weights, pools and programs.
      rates: of the device.
      random: source of token ids and page orders.
      looked_up: Engram rows by count; random bytes take longer to draw than a look-up takes.
    """

    config: ModelConfig
    runner: ModelRunner
    rates: Ceilings
    random: np.random.Generator
    looked_up: dict[int, EngramRows] = dataclasses.field(default_factory=dict)

    @property
    def geometry(self) -> V41PoolGeometry:
        """Of the pools."""
        return self.runner.setup.geometry

    def planned(
        self, phase: Phase, starts: Sequence[int], ends: Sequence[int], *, is_final: bool, pages: Sequence[np.ndarray]
    ) -> ScheduledBatch:
        """A step over requests 0, 1, ... whose slots are moved to where the step starts."""
        count, history = len(starts), self.geometry.history_size
        total = int(np.sum(ends) - np.sum(starts))
        width = max(len(table) for table in pages)
        tables = np.zeros((count, width), np.int32)
        for row, table in enumerate(pages):
            tables[row, : len(table)] = table
        start = np.array(starts, np.int32)
        first = np.where(start > 0, Preparation.REWIND, Preparation.RESET)
        return ScheduledBatch(
            index=0,
            phase=phase,
            request_ids=tuple(range(count)),
            generations=(0,) * count,
            slots=np.arange(count, dtype=np.int32),
            starts=start,
            resumes=start.copy(),
            ends=np.array(ends, np.int32),
            is_final=np.full(count, is_final),
            preparation=first.astype(np.int32),
            write_from=np.zeros(count, np.int32),
            cached_until=np.zeros(count, np.int32),
            swa_cached_until=np.zeros(count, np.int32),
            swa_replay_start=np.zeros(count, np.int32),
            history=self.tokens((count, history)),
            token_ids=self.tokens(total),
            image_rows=np.zeros(total, bool),
            block_tables=tables,
            table_lengths=np.array([len(table) for table in pages], np.int32),
            sampling=(SamplingParams(),) * count,
            output_positions=(0,) * count,
            images=((),) * count,
            decoder_replay=phase is Phase.PREFILL,
            ops=StateMaintenanceOps(),
        )

    def tokens(self, shape: Any) -> np.ndarray:
        """Random text ids."""
        return self.random.integers(3, min(self.config.text.vocab_size, self.config.image_token_id), shape, np.int32)

    def arrays(self, batch: ScheduledBatch, buckets: Buckets) -> tuple[BatchStep, StepShape]:
        """A planned step as arrays, and its shape."""
        compressed = self.config.text.engram_compressed_vocab_size
        return build_batch_step(
            batch,
            self.geometry,
            buckets,
            lambda ids: ids % max(compressed, 1),
            num_pages=self.runner.num_pages,
            num_slots=self.runner.num_slots,
        )

    def run(self, batch: ScheduledBatch, buckets: Buckets) -> tuple[Any, float]:
        """Builds and dispatches a step; its output and the host's seconds."""
        began = time.perf_counter()
        arrays, shape = self.arrays(batch, buckets)
        rows = [SamplingRow(0.0, 0, 1.0, 0.0, 0, 0)] * len(batch.output_requests)
        inputs = sampling_inputs(rows, sampled_rows(shape))
        sampling = self.runner.step_sampling(inputs, outputs=shape.outputs, targets=self.runner.no_targets(shape))
        output = self.runner.execute(shape, arrays, self.engram_rows(shape.rows), sampling)
        if isinstance(self.runner, DraftRunner) and shape.verifies:
            self.runner.draft(shape.requests, batch.slots.tolist(), inputs)
        return output, time.perf_counter() - began

    def engram_rows(self, count: int) -> EngramRows:
        """Table rows as a look-up would return them."""
        if count in self.looked_up:
            return self.looked_up[count]
        text = self.config.text
        shape = (count, (text.engram_max_ngram_size - 1) * text.engram_n_heads)
        layers = range(len(text.engram_layer_ids))
        # Codes below 0x78 and their negatives are finite.
        codes = tuple(
            self.random.integers(0, 256, (*shape, text.engram_head_dim), np.uint8) & np.uint8(0xF7) for _ in layers
        )
        scales = tuple(np.full((*shape, text.engram_head_dim // 32), 127, np.uint8) for _ in layers)
        return self.looked_up.setdefault(count, EngramRows(codes=codes, scales=scales))

    def work(self, rows: Rows) -> Work:
        """The least work of a step."""
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.runner.params)
        return least_work(self.config, self.geometry, abstract, Parallel(), rows, ())


@dataclasses.dataclass(frozen=True)
class Cell:
    """One entry of the table.

    Attributes:
      label: what it is.
      forwards: planned steps that make one measurement, and their buckets.
      work: the least work of all of them.
      tokens: that a measurement processes.
    """

    label: dict[str, Any]
    forwards: list[tuple[ScheduledBatch, Buckets]]
    work: Work
    tokens: int

    def run(self, bench: Bench) -> tuple[Any, float]:
        """Dispatches the forwards; the last output and the host's seconds."""
        host = 0.0
        for planned, buckets in self.forwards:
            output, seconds = bench.run(planned, buckets)
            host += seconds
        return output, host


def decode_cell(bench: Bench, batch: int, context: int) -> Cell:
    """A decode step of `batch` requests that hold `context` tokens each."""
    rows = 1 + bench.geometry.speculative_tokens
    per_request = bench.geometry.pages_for(context + rows)
    order = bench.random.permutation(bench.runner.num_pages)[: batch * per_request].astype(np.int32)
    pages = order.reshape(batch, per_request)
    verified = (rows,) if rows > 1 else ()
    buckets = Buckets((batch,), (128,), (batch,), (per_request,), (per_request,), verify_rows=verified)
    planned = bench.planned(Phase.DECODE, [context] * batch, [context + rows] * batch, is_final=True, pages=list(pages))
    return Cell(
        {"phase": "decode", "batch": batch, "context": context, "drafts": rows - 1},
        [(planned, buckets)],
        bench.work(Rows(batch * rows, batch * rows, batch * rows, context)),
        batch,
    )


def prefill_cell(bench: Bench, prompt: int, chunk: int) -> Cell:
    """One prompt in chunks; only the last runs the decoder, on its tail."""
    pages = [bench.random.permutation(bench.runner.num_pages)[: bench.geometry.pages_for(prompt)].astype(np.int32)]
    ladder = prefill_token_ladder(min(chunk, prompt))
    buckets = Buckets((1,), ladder, (1,) * len(ladder), (len(pages[0]),), (len(pages[0]),))
    window = bench.config.text.sliding_window
    forwards, work = [], Work(0.0, 0.0, 0.0)
    for start, end in itertools.pairwise([*range(0, prompt, chunk), prompt]):
        final = end == prompt
        planned = bench.planned(Phase.PREFILL, [start], [end], is_final=final, pages=pages)
        forwards.append((planned, buckets))
        # Rows attend to what is before them: half of the chunk on average.
        rows = Rows(end - start, min(window, end - start) if final else 0, int(final), (start + end) // 2)
        part = bench.work(rows)
        work = Work(work.memory_bytes + part.memory_bytes, work.operations + part.operations, 0.0)
    return Cell({"phase": "prefill", "prompt": prompt, "chunk": chunk}, forwards, work, prompt)


def _kernels(step: Callable[[], tuple[Any, float]]) -> dict[str, Any]:
    """Sum of the kernel times of one call, and the largest by name without the number that XLA appends."""
    launched = launched_kernels(lambda: step()[0])
    if launched is None:
        return {}
    milliseconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for name, microseconds in launched:
        kind = name.rstrip("_0123456789")
        milliseconds[kind] += microseconds / 1e3
        launches[kind] += 1
    largest = [[name, launches[name], round(time, 3)] for name, time in milliseconds.most_common(KERNELS_LISTED)]
    return {
        "kernel_ms": round(sum(milliseconds.values()), 3),
        "kernels": len(launched),
        "largest_kernels": largest,
    }


def _timed(step: Any) -> tuple[float, float]:
    """Seconds of a call when calls queue up, and the host's median share."""
    began = time.perf_counter()
    jax.block_until_ready(step()[0])
    once = time.perf_counter() - began
    count = max(3, min(MOST_STEPS, int(SECONDS_A_CELL / once)))
    hosts = []
    began = time.perf_counter()
    for _ in range(count):
        output, host = step()
        hosts.append(host)
    jax.block_until_ready(output)
    return (time.perf_counter() - began) / count, statistics.median(hosts)


def _alone(step: Callable[[], tuple[Any, float]]) -> tuple[float, float]:
    """Median seconds of the host, and until the result is there, of calls that find an idle device."""
    hosts, whole = [], []
    for _ in range(7):
        began = time.perf_counter()
        output, host = step()
        jax.block_until_ready(output)
        whole.append(time.perf_counter() - began)
        hosts.append(host)
    return statistics.median(hosts), statistics.median(whole)


def _host_events(step: Callable[[], tuple[Any, float]]) -> dict[str, Any]:
    """What the host did in one call, by JAX's own annotations: name, count and milliseconds, nested ones included."""
    options = ProfileOptions()
    options.host_tracer_level, options.python_tracer_level, options.device_tracer_level = 2, 0, 0
    with tempfile.TemporaryDirectory() as directory:
        jax.profiler.start_trace(directory, profiler_options=options)
        jax.block_until_ready(step()[0])
        jax.profiler.stop_trace()
        [file] = pathlib.Path(directory).rglob("*.xplane.pb")
        data = ProfileData.from_file(str(file))
    milliseconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for plane in data.planes:
        if plane.name.startswith("/host:"):
            for line in plane.lines:
                for event in line.events:
                    name = line.name.split("/")[0] + ": " + event.name.split("#")[0][:60].rstrip("_0123456789")
                    milliseconds[name] += event.duration_ns / 1e6
                    counts[name] += 1
    return {"host_events": [[name, counts[name], round(time, 3)] for name, time in milliseconds.most_common(40)]}


def _against(bench: Bench, work: Work, seconds: float) -> dict[str, float]:
    memory = work.memory_bytes / bench.rates.bytes_per_second
    compute = work.operations / bench.rates.flops_per_second
    return {
        "step_ms": round(1e3 * seconds, 3),
        "bytes": round(work.memory_bytes),
        "flops": round(work.operations),
        "memory_bound_ms": round(1e3 * memory, 3),
        "compute_bound_ms": round(1e3 * compute, 3),
        "fraction": round(max(memory, compute) / seconds, 4),
    }


def build(arguments: argparse.Namespace, rates: Ceilings) -> Bench:
    """The model, its pools and its runner."""
    config = preset(arguments.preset)
    decode = [(batch, context) for batch in arguments.batches for context in arguments.contexts]
    rows = 1 + arguments.drafts
    longest = max([context + rows for _, context in decode] + arguments.prompts)
    options = EngineConfig(
        dtype="bfloat16",
        kv_cache_dtype=arguments.kv_cache_dtype,
        index_cache_dtype=arguments.index_cache_dtype,
        kernels=arguments.kernels,
        max_num_seqs=max(arguments.batches),
        max_model_len=longest,
        num_pages=1,
        vision="off",
        speculative_method="dspark" if arguments.drafts else None,
        num_speculative_tokens=arguments.drafts,
    )
    view = ModelView.from_config(config)
    validate_runtime_config(options, view)
    geometry = options.geometry(view)
    slots = max(arguments.batches)
    pages = max(
        max((batch * geometry.pages_for(context + rows) for batch, context in decode), default=1),
        max((geometry.pages_for(prompt) for prompt in arguments.prompts), default=1),
    )
    setup = ModelSetup(config, geometry, Precision(), options.kernels)
    form: WeightForm = "arranged" if arranges_experts(options, config.text, on_mesh=False) else "stored"
    params = random_parameters(config, max_model_len=longest, seed=arguments.seed, form=form)
    sizes = {"num_pages": pages, "num_slots": slots}
    if arguments.drafts:
        runner: ModelRunner = DraftRunner(params, setup, random_draft(config, arguments.seed, form), **sizes)
    else:
        runner = ModelRunner(params, setup, **sizes)
    runner.replace_pools(random_pools(geometry, pages, slots))
    return Bench(config, runner, rates, np.random.default_rng(arguments.seed))


def cells(bench: Bench, arguments: argparse.Namespace) -> Iterator[Cell]:
    """All entries, cheapest first."""
    for context in arguments.contexts:
        for batch in arguments.batches:
            yield decode_cell(bench, batch, context)
    for prompt in arguments.prompts:
        yield prefill_cell(bench, prompt, arguments.chunk)


def measurements(bench: Bench, table: Sequence[Cell], traced: bool) -> Iterator[dict[str, Any]]:
    """Times of all cells, then their kernels."""
    shapes = [[bench.arrays(*forward)[1] for forward in cell.forwards] for cell in table]
    began = time.perf_counter()
    planned = list(itertools.chain.from_iterable(shapes))
    drafts = {shape.requests for shape in planned if shape.verifies}
    bench.runner.warm_up(planned, drafts=sorted(drafts))
    yield {
        "programs": len(bench.runner.programs),
        "compile_all_s": round(time.perf_counter() - began, 1),
        "compile_each_s": [round(program.seconds, 1) for program in bench.runner.programs],
    }
    for cell in table:
        if not jnp.isfinite(cell.run(bench)[0].logits).all():
            raise SystemExit(f"{cell.label}: logits are not finite, so that rows choose the same experts")
        seconds, host = _timed(lambda cell=cell: cell.run(bench))
        alone, latency = _alone(lambda cell=cell: cell.run(bench))
        yield {
            **cell.label,
            **_against(bench, cell.work, seconds),
            "host_ms": round(1e3 * host, 3),
            "host_alone_ms": round(1e3 * alone, 3),
            "step_alone_ms": round(1e3 * latency, 3),
            "tokens_per_s": round(cell.tokens / seconds, 1),
        }
    for cell in table if traced else ():
        yield {**cell.label, **_host_events(lambda cell=cell: cell.run(bench))}
    for cell in table:
        kernels = _kernels(lambda cell=cell: cell.run(bench))
        if kernels:
            yield {**cell.label, **kernels}


def main(given: Sequence[str] | None = None) -> None:
    """Measures and prints."""

    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="v4.1-flash-96e")
    parser.add_argument("--batches", type=sizes, default=[1, 8, 32, 64, 128])
    parser.add_argument("--contexts", type=sizes, default=[1024, 8192, 65536])
    parser.add_argument("--prompts", type=sizes, default=[1024, 4096, 16384, 32768])
    parser.add_argument("--chunk", type=int, default=8192, help="rows of one prefill forward")
    parser.add_argument("--drafts", type=int, default=0, help="proposals a decode step verifies for each request")
    parser.add_argument("--kv-cache-dtype", default="bf16", choices=("bf16", "fp4"))
    parser.add_argument("--index-cache-dtype", default="fp8", choices=("fp8", "fp4"))
    parser.add_argument("--kernels", default="auto", choices=("auto", "xla", "pallas"))
    parser.add_argument("--host-events", action="store_true", help="list what the host does in a step")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(given)
    rates = measure_ceilings(small=jax.default_backend() == "cpu", profile=False)
    began = time.perf_counter()
    bench = build(arguments, rates)
    jax.block_until_ready((bench.runner.params, bench.runner.pools))
    header = provenance() | {
        "benchmark": "end_to_end",
        "preset": arguments.preset,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "index_cache_dtype": arguments.index_cache_dtype,
        "copy_bytes_per_s": round(rates.bytes_per_second),
        "matmul_flops_per_s": round(rates.flops_per_second),
        "setup_s": round(time.perf_counter() - began, 1),
        "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(bench.runner.params)),
    }
    for record in measurements(bench, list(cells(bench, arguments)), arguments.host_events):
        print(json.dumps(header | record), flush=True)


if __name__ == "__main__":
    main()
