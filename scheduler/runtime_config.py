"""The options of a serving runtime and every reason to refuse them before weights or pools are touched.

Option names are those of the runtime specification, "Options", in snake case. Which options of parts that do not
exist yet are known by name, so that asking for one is refused and never ignored.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

from scheduler.model_view import SUPPORTED_ARCHITECTURE, ModelView
from scheduler.pool_geometry import V41PoolGeometry
from scheduler.states import CheckpointSpec, StateTransfer

_log = logging.getLogger(__name__)

SHARED_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")
"""Address schemes of a shared page store."""

_NATIVE_QUANTIZATION = {
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "expert_dtype": "fp4",
}


class RuntimeConfigError(ValueError):
    """Options that cannot be served; `faults` holds one line each."""

    def __init__(self, faults: list[str]):
        self.faults = tuple(faults)
        super().__init__("; ".join(faults))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of the engine; see the runtime specification, "Options", for the meaning of each.

    Attributes:
      kv_cache_dtype: "bf16" or "fp4" (then the windows are FP8).
      index_cache_dtype: "fp8" or "fp4".
      kv_cache_block_size: PAGE, in tokens.
      enable_prefix_caching: reuse pages of equal prefixes.
      encoder_swa_bounded_replay: rebuild encoder windows after a hit; off restores checkpoint images.
      decoder_swa_bounded_replay: prefill runs the decoder on the last `W` rows only.
      enable_chunked_prefill: a prompt may be split over several steps.
      max_num_batched_tokens: rows of one step, recomputed rows included; every data shard has its share.
      long_prefill_token_threshold: new tokens one request may prefill in a step; 0 means no cap.
      max_num_seqs: requests that run at once, the number of state slots; every data shard has its share.
      max_model_len: tokens of one request at most; None takes the model's maximum.
      memory_utilization: fraction of device memory to use.
      state_checkpoint_interval_tokens: ladder of checkpoint images; 0 none, -1 demand and prompt end only.
      num_pages: PAGE units of the pool of every data shard; None sizes it from memory.
      vision: "auto" accepts images when the checkpoint has a vision tower, "on" needs one, "off" is text only.
      vision_cache_bytes: host memory for images of requests, patches or embedding rows.
      dtype: activation dtype, "bfloat16" or "float32".
      activation_quantization: apply the activation quantizers of the model.
      kernels: "auto", "xla" or "pallas".
      mesh: devices per named axis, `data` and `model`.
      enable_expert_parallel: shard whole experts instead of their intermediate dimension.
      expert_exchange: how rows reach whole experts of other data shards: "gather" sends all to every chip, "ragged"
        each only where its experts are, "auto" takes what sends less.
      enforce_eager: run without whole-step compilation.
      execution_mode: "FULL" or "PIECEWISE", with `enforce_eager` off.
      compile_level: 0 or 3.
      decode_buckets: ascending batch sizes of compiled decode steps, of one data shard; empty takes the default ladder.
      admission_delay_factor: multiple of the last prefill's duration that a waiting request is held back.
      speculative_method: "dspark" drafts with the checkpoint's own draft model; None decodes token by token.
      num_speculative_tokens: proposals verified in a step, at most the draft's block (5).
      speculative_model: None; another draft model is refused.
      dynamic_verify_lengths: verify as many proposals as confidence and cost promise to pay, by a calibration profile.
      calibration_profile: file that `v41jax calibrate` wrote for this model, device and these options.
      relaxed_acceptance: known and refused.
      host_cache_bytes: host memory for pages beyond the device; 0 keeps none.
      disk_cache_dir: directory for pages in files, of this process alone; None keeps none.
      disk_cache_bytes: of those files at most.
      shared_cache_url: Redis or Valkey store for pages, shared with replicas of the same model.
      shared_cache_timeout: seconds that one operation of the shared store may take.
      cache_fetch_timeout: seconds that a request may be held back for its pages.
      cache_model_id: name of the weights in those caches; None derives one from the checkpoint.
      kv_transfer_connector: connector to another program's page storage.
      prompt_logprobs, export_hidden_states: outputs of rows other than the last.
      pipeline_parallel_size, prefill_context_parallel_size, decode_context_parallel_size, data_parallel_size,
        enable_dp_attention, two_batch_overlap, rapid_serve, plugin_mode, online_quantization, enable_eplb: known and
        refused.
      engram_tables: "host" maps them into memory, "device" cuts them by rows over the chips of the mesh.
      coordinator, num_processes, process_id: `host:port` of process 0, how many processes share the mesh, and which
        this one is; None is one process, "auto" asks the cluster's environment for all three.
    """

    kv_cache_dtype: str = "bf16"
    index_cache_dtype: str = "fp8"
    kv_cache_block_size: int = 128
    enable_prefix_caching: bool = True
    encoder_swa_bounded_replay: bool = True
    decoder_swa_bounded_replay: bool = True
    enable_chunked_prefill: bool = True
    max_num_batched_tokens: int = 16384
    long_prefill_token_threshold: int = 0
    max_num_seqs: int = 512
    max_model_len: int | None = None
    memory_utilization: float = 0.9
    state_checkpoint_interval_tokens: int = 8192
    num_pages: int | None = None
    vision: str = "auto"
    vision_cache_bytes: int = 1 << 30
    dtype: str = "bfloat16"
    activation_quantization: bool = True
    kernels: str = "auto"
    mesh: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"data": 1, "model": 1})
    enable_expert_parallel: bool = False
    expert_exchange: str = "auto"
    enforce_eager: bool = False
    execution_mode: str = "FULL"
    compile_level: int = 3
    decode_buckets: tuple[int, ...] = ()
    admission_delay_factor: float = 0.0
    speculative_method: str | None = None
    num_speculative_tokens: int = 0
    speculative_model: str | None = None
    dynamic_verify_lengths: bool = False
    calibration_profile: str | None = None
    relaxed_acceptance: bool = False
    host_cache_bytes: int = 0
    disk_cache_dir: str | None = None
    disk_cache_bytes: int = 1 << 36
    shared_cache_url: str | None = None
    shared_cache_timeout: float = 0.5
    cache_fetch_timeout: float = 2.0
    cache_model_id: str | None = None
    kv_transfer_connector: str | None = None
    prompt_logprobs: bool = False
    export_hidden_states: bool = False
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_dp_attention: bool = False
    two_batch_overlap: bool = False
    rapid_serve: bool = False
    plugin_mode: bool = False
    online_quantization: str | None = None
    enable_eplb: bool = False
    engram_tables: str = "host"
    coordinator: str | None = None
    num_processes: int = 1
    process_id: int = 0

    @property
    def tensor_parallel_size(self) -> int:
        """Devices that share one replica's heads, the `model` axis of the mesh."""
        return int(self.mesh.get("model", 1))

    @property
    def data_shards(self) -> int:
        """Data shards, the `data` axis of the mesh."""
        return int(self.mesh.get("data", 1))

    def of_shard(self) -> EngineConfig:
        """Options of one data shard: its share of requests and rows, rounded up; everything else is the same."""
        shards = self.data_shards
        if shards <= 1:
            return self
        return dataclasses.replace(
            self,
            mesh={**self.mesh, "data": 1},
            max_num_seqs=-(-self.max_num_seqs // shards),
            max_num_batched_tokens=-(-self.max_num_batched_tokens // shards),
        )

    @property
    def uses_tiers(self) -> bool:
        """Pages are kept beyond the device."""
        return bool(self.host_cache_bytes or self.disk_cache_dir is not None or self.shared_cache_url is not None)

    def model_len(self, view: ModelView) -> int:
        """Tokens of one request at most."""
        return view.max_position if self.max_model_len is None else self.max_model_len

    def decoder_replay(self, view: ModelView) -> bool:
        """Whether prefill skips decoder rows: asked for and possible for this model.

        A model whose layout cannot be replayed switches the feature off with a logged reason (runtime specification,
        "Off switch").
        """
        if not self.decoder_swa_bounded_replay:
            return False
        obstacle = view.decoder_replay_obstacle()
        if obstacle is not None:
            _log.warning("decoder_swa_bounded_replay is off: %s", obstacle)
        return obstacle is None

    def min_final_prefill_rows(self, view: ModelView) -> int:
        """Rows a final prefill forward must hold: `W` under decoder replay, else 0."""
        return view.window_size if self.decoder_replay(view) else 0

    def checkpoint_interval(self) -> int:
        """`state_checkpoint_interval_tokens` snapped down to the hash-block grid, with a warning when it moves."""
        interval = self.state_checkpoint_interval_tokens
        if interval <= 0:
            return interval
        snapped = interval - interval % self.kv_cache_block_size
        if snapped != interval:
            _log.warning(
                "state_checkpoint_interval_tokens %d is no multiple of the page, %d tokens: using %d",
                interval,
                self.kv_cache_block_size,
                snapped,
            )
        return snapped

    def transfer(self, geometry: V41PoolGeometry) -> StateTransfer:
        """How a prefix hit becomes resumable."""
        if not self.enable_prefix_caching:
            return StateTransfer.none()
        if self.encoder_swa_bounded_replay:
            return StateTransfer.replay()
        return StateTransfer.copy(CheckpointSpec.of(geometry))

    def geometry(self, view: ModelView) -> V41PoolGeometry:
        """The pools' geometry for a model.

        Raises:
          GeometryError: for sizes that cannot be laid out.
        """
        return V41PoolGeometry(
            layers=view.layers,
            owners=view.owners,
            block_size=self.kv_cache_block_size,
            window_size=view.window_size,
            head_dim=view.head_dim,
            index_dim=view.index_dim,
            history_size=view.history_size,
            packed=self.kv_cache_dtype == "fp4",
            index_format=self.index_cache_dtype,
            speculative_tokens=self.num_speculative_tokens,
            layer_ratios=view.layer_ratios,
            index_topk=view.index_topk,
            unquantized_dtype=None if self.activation_quantization else self.dtype,
            draft_layers=view.draft_layers,
        )


def validate_runtime_config(config: EngineConfig, model_config: Any) -> None:
    """Refuses what cannot be served, before any weight is read.

    Args:
      config: the options.
      model_config: a `ModelView`, or a parsed `ModelConfig`.

    Raises:
      RuntimeConfigError: with every broken rule of the runtime specification, "Rejections before weights or pools load
        (`validate_runtime_config`)".
    """
    view = model_config if isinstance(model_config, ModelView) else ModelView.from_config(model_config)
    faults = [
        *_model_faults(view),
        *_cache_faults(config, view),
        *_tier_faults(config),
        *_scheduling_faults(config, view),
        *_parallel_faults(config, view),
        *_execution_faults(config),
        *_speculation_faults(config, view),
        *_unsupported_faults(config),
    ]
    if faults:
        raise RuntimeConfigError(faults)


def _model_faults(view: ModelView) -> list[str]:
    faults = []
    if view.architecture != SUPPORTED_ARCHITECTURE:
        faults.append(f"architecture {view.architecture!r} is not served: only {SUPPORTED_ARCHITECTURE!r} is")
    if view.quantization is not None:
        for key, native in _NATIVE_QUANTIZATION.items():
            found = view.quantization.get(key)
            if (list(found) if isinstance(found, tuple | list) else found) != native:
                faults.append(f"checkpoint quantization has {key} {found!r}: only the native {native!r} is served")
    return faults


def _cache_faults(config: EngineConfig, view: ModelView) -> list[str]:
    faults = []
    page = config.kv_cache_block_size
    if config.kv_cache_dtype not in ("bf16", "fp4"):
        faults.append(f"kv_cache_dtype {config.kv_cache_dtype!r} is unknown: use 'bf16' or 'fp4'")
    if config.index_cache_dtype not in ("fp8", "fp4"):
        faults.append(f"index_cache_dtype {config.index_cache_dtype!r} has no scorer: use 'fp8' or 'fp4'")
    if page % 2:
        faults.append(f"kv_cache_block_size {page} is odd: a group of two tokens may not straddle a page")
    if page < 32 or page % 32:
        faults.append(f"kv_cache_block_size {page} must be a multiple of 32 and at least 32 (whole index tiles)")
    if page < view.window_size - 1:
        for name in ("encoder_swa_bounded_replay", "decoder_swa_bounded_replay"):
            if getattr(config, name):
                faults.append(
                    f"kv_cache_block_size {page} is below {view.window_size - 1}, the window less one, with {name} on: "
                    "use a larger page or turn it off"
                )
    interval = config.state_checkpoint_interval_tokens
    if interval < -1 or 0 < interval < page:
        faults.append(
            f"state_checkpoint_interval_tokens {interval} must be 0, -1 or at least one page of {page} tokens"
        )
    if config.num_pages is not None and config.num_pages < 1:
        faults.append(f"num_pages {config.num_pages} must be at least 1")
    if not 0 < config.memory_utilization <= 1:
        faults.append(f"memory_utilization {config.memory_utilization} must lie in (0, 1]")
    if config.kv_cache_dtype == "fp4" and not config.activation_quantization:
        faults.append("kv_cache_dtype 'fp4' stores quantized rows: it needs activation_quantization")
    return faults


def _tier_faults(config: EngineConfig) -> list[str]:
    faults = []
    if config.host_cache_bytes < 0:
        faults.append(f"host_cache_bytes {config.host_cache_bytes} must not be negative")
    if config.disk_cache_dir is not None and config.disk_cache_bytes < 1:
        faults.append(f"disk_cache_bytes {config.disk_cache_bytes} must be at least 1 with disk_cache_dir")
    if config.shared_cache_url is not None:
        scheme = config.shared_cache_url.partition("://")[0]
        if "://" not in config.shared_cache_url or scheme not in SHARED_SCHEMES:
            faults.append(f"shared_cache_url must begin with one of {', '.join(SHARED_SCHEMES)} and '://'")
    for name in ("shared_cache_timeout", "cache_fetch_timeout"):
        seconds = getattr(config, name)
        if not 0 < seconds <= 600:
            faults.append(f"{name} {seconds} must lie in (0, 600] seconds")
    if config.uses_tiers and not config.enable_prefix_caching:
        faults.append("pages beyond the device (host, disk or shared cache) need enable_prefix_caching")
    if config.uses_tiers and not config.encoder_swa_bounded_replay and not config.state_checkpoint_interval_tokens:
        faults.append(
            "pages beyond the device need encoder_swa_bounded_replay, or checkpoint images: "
            "state_checkpoint_interval_tokens 0 keeps none"
        )
    return faults


def _scheduling_faults(config: EngineConfig, view: ModelView) -> list[str]:
    faults = []
    page = config.kv_cache_block_size
    budget = config.of_shard().max_num_batched_tokens
    shared = f", the share of each of {config.data_shards} data shards," if config.data_shards > 1 else ""
    replays = config.encoder_swa_bounded_replay or config.decoder_swa_bounded_replay
    if budget < 1:
        faults.append(f"max_num_batched_tokens {budget} must be at least 1")
    elif replays and budget < 2 * page:
        faults.append(
            f"max_num_batched_tokens {budget}{shared} is below two pages of {page} tokens with a bounded replay on: a "
            "request could wait forever"
        )
    length = config.model_len(view)
    if not 1 <= length <= view.max_position:
        faults.append(f"max_model_len {length} must lie in 1..{view.max_position}, the model's maximum")
    cap = config.long_prefill_token_threshold
    if cap and (cap % 2 or not page <= cap <= length):
        faults.append(f"long_prefill_token_threshold {cap} must be 0 or an even number from {page} to {length}")
    if config.max_num_seqs < 1:
        faults.append(f"max_num_seqs {config.max_num_seqs} must be at least 1")
    elif config.max_num_seqs < config.data_shards:
        faults.append(
            f"max_num_seqs {config.max_num_seqs} is below the {config.data_shards} data shards, which run at least one "
            "request each: raise it or use a smaller 'data' axis"
        )
    if not 0 <= config.admission_delay_factor < math.inf:
        faults.append(f"admission_delay_factor {config.admission_delay_factor} must be a finite number from 0")
    buckets = config.decode_buckets
    if any(bucket < 1 for bucket in buckets) or list(buckets) != sorted(set(buckets)):
        faults.append(f"decode_buckets {list(buckets)} must be ascending positive integers")
    if config.decoder_swa_bounded_replay:
        for name in ("prompt_logprobs", "export_hidden_states"):
            if getattr(config, name):
                faults.append(f"{name} reads rows that decoder_swa_bounded_replay leaves undefined: turn one off")
    return faults


def _parallel_faults(config: EngineConfig, view: ModelView) -> list[str]:
    faults = []
    if config.engram_tables not in ("host", "device"):
        faults.append(f"engram_tables {config.engram_tables!r} is unknown: use 'host' or 'device'")
    elif config.engram_tables == "device" and config.num_processes > 1:
        faults.append("engram_tables 'device' is not supported over several processes: use 'host'")
    for axis, size in config.mesh.items():
        if axis not in ("data", "model"):
            faults.append(f"mesh axis {axis!r} is unknown: use 'data' and 'model'")
        if size < 1:
            faults.append(f"mesh axis {axis!r} has size {size}: it must be at least 1")
    parallel = config.tensor_parallel_size
    if parallel >= 1:
        for name in ("num_attention_heads", "index_n_heads", "o_groups", "moe_intermediate_size"):
            size = getattr(view, name)
            if size % parallel:
                faults.append(f"tensor parallel size {parallel} does not divide {name} {size}")
        experts = parallel * max(config.data_shards, 1)
        if config.enable_expert_parallel and view.n_routed_experts % experts:
            faults.append(f"expert parallel size {experts} does not divide n_routed_experts {view.n_routed_experts}")
    whole = config.enable_expert_parallel
    if config.expert_exchange in ("gather", "ragged") and not (whole and config.data_shards > 1):
        faults.append(
            f"expert_exchange {config.expert_exchange!r} needs whole experts over several data shards, these are "
            f"{'whole' if whole else 'cut'} over {config.data_shards}: use 'auto', or enable_expert_parallel and a "
            "larger 'data' axis"
        )
    if config.data_parallel_size != 1:
        faults.append(
            f"data_parallel_size {config.data_parallel_size} is not supported: data shards are the mesh axis 'data'"
        )
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(config, name) != 1:
            faults.append(f"{name} {getattr(config, name)} is not supported: use 1")
    return faults


def _execution_faults(config: EngineConfig) -> list[str]:
    faults = []
    if config.execution_mode not in ("FULL", "PIECEWISE"):
        faults.append(f"execution_mode {config.execution_mode!r} is unknown: use 'FULL', 'PIECEWISE', or enforce_eager")
    if config.compile_level not in (0, 3):
        faults.append(f"compile_level {config.compile_level} is unknown: use 0 or 3")
    elif config.compile_level == 3 and config.execution_mode == "PIECEWISE" and not config.enforce_eager:
        faults.append("execution_mode 'PIECEWISE' needs compile_level 0: level 3 pairs with whole-step or eager only")
    chips = math.prod(config.mesh.values())
    if (chips > 1 or config.num_processes > 1) and (config.enforce_eager or config.execution_mode == "PIECEWISE"):
        name = "enforce_eager" if config.enforce_eager else "execution_mode 'PIECEWISE'"
        faults.append(f"{name} runs on one device, the mesh has {chips}: use execution_mode 'FULL'")
    if config.dtype not in ("bfloat16", "float32"):
        faults.append(f"dtype {config.dtype!r} is unknown: use 'bfloat16' or 'float32'")
    if config.vision not in ("auto", "on", "off"):
        faults.append(f"vision {config.vision!r} is unknown: use 'auto', 'on' or 'off'")
    if config.vision_cache_bytes < 0:
        faults.append(f"vision_cache_bytes {config.vision_cache_bytes} must not be negative")
    if config.kernels not in ("auto", "xla", "pallas"):
        faults.append(f"kernels {config.kernels!r} is unknown: use 'auto', 'xla' or 'pallas'")
    if config.expert_exchange not in ("auto", "gather", "ragged"):
        faults.append(f"expert_exchange {config.expert_exchange!r} is unknown: use 'auto', 'gather' or 'ragged'")
    return faults


def _speculation_faults(config: EngineConfig, view: ModelView) -> list[str]:
    faults = []
    wanted = config.speculative_method is not None or config.num_speculative_tokens > 0
    if config.speculative_method not in (None, "dspark"):
        faults.append(f"speculative_method {config.speculative_method!r} is unknown: only 'dspark' exists")
    if wanted:
        if not view.draft_layers:
            faults.append("speculation needs a draft: the checkpoint has none (num_nextn_predict_layers is 0)")
        if config.speculative_method is None:
            faults.append(f"num_speculative_tokens {config.num_speculative_tokens} needs speculative_method 'dspark'")
        if not 0 < config.num_speculative_tokens <= view.draft_tokens:
            faults.append(
                f"num_speculative_tokens {config.num_speculative_tokens} is outside 1..{view.draft_tokens}: the draft "
                "was trained on blocks of that width"
            )
        if config.speculative_model is not None:
            faults.append(
                f"speculative_model {config.speculative_model!r}: the draft's weights are the checkpoint's own"
            )
        budget = config.of_shard().max_num_batched_tokens
        if 1 <= budget <= config.num_speculative_tokens:
            faults.append(
                f"max_num_batched_tokens {budget} cannot hold the "
                f"{config.num_speculative_tokens + 1} rows that one request verifies"
            )
        if config.execution_mode == "PIECEWISE" and not config.enforce_eager:
            faults.append("execution_mode 'PIECEWISE' keeps no features to draft from: use 'FULL' or enforce_eager")
    if config.relaxed_acceptance:
        faults.append("relaxed_acceptance is not supported: drafts are verified exactly")
    if config.dynamic_verify_lengths and config.calibration_profile is None:
        faults.append("dynamic_verify_lengths needs a calibration_profile")
    if config.calibration_profile is not None and not config.dynamic_verify_lengths:
        faults.append("calibration_profile is given without dynamic_verify_lengths")
    if config.dynamic_verify_lengths and not wanted:
        faults.append("dynamic_verify_lengths needs speculation")
    return faults


def _unsupported_faults(config: EngineConfig) -> list[str]:
    faults = []
    for name in ("enable_dp_attention", "two_batch_overlap", "rapid_serve", "plugin_mode", "enable_eplb"):
        if getattr(config, name):
            faults.append(f"{name} is not supported: leave it off")
    if config.online_quantization is not None:
        faults.append(f"online_quantization {config.online_quantization!r} is not supported: weights stay as stored")
    connector = config.kv_transfer_connector
    if connector not in (None, "lmcache_mp"):
        faults.append(f"kv_transfer_connector {connector!r} is not supported: only 'lmcache_mp' is")
    elif connector is not None:
        faults.append("kv_transfer_connector 'lmcache_mp' is not available in this version: leave it unset")
    return faults
