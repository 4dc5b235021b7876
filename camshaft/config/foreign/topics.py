"""Topics that camshaft does not implement, and the words by which users ask for them.

    topic_of_key("load_in_4bit")                # LOW_BIT
    topic_of_algorithm("dpo").message()         # one sentence and the section of docs/not-here.md

`docs/not-here.md` has a section for each topic, which names what to use instead. A topic leaves the list when it is
implemented.
"""

import re
from typing import NamedTuple

PAGE = "docs/not-here.md"


class Topic(NamedTuple):
    """Something that is not implemented."""

    title: str
    """Title of the section in `PAGE`."""
    sentence: str
    keys: str = r"(?!)"
    """Pattern of words in keys and in the names of config files that ask for it."""
    names: tuple[str, ...] = ()
    """Names of commands and of algorithms."""

    @property
    def anchor(self) -> str:
        """Anchor of the section."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    def message(self) -> str:
        """Return the sentence with a reference to the section."""
        return f"{self.sentence} See {PAGE}#{self.anchor}."


STREAM = Topic(
    "Overlapping rows",
    "Asynchronous training generates whole batches: set max_staleness=1. Rows that overlap and go on with newer "
    "weights are not implemented.",
    r"async|async_(?:grpo|train)|fully_async|one_step_(?:off|overlap)|staleness\w*|max_staleness_\w+|max_off_policy\w*"
    r"|(?:max_)?async_level|partial_rollout|async_trainer\w*|max_inflight\w*|max_concurrent_rollouts|trainer_mode"
    r"|trigger_parameter_sync_step|in_flight_weight_updates|max_head_offpolicyness|max_steps_off_policy"
    r"|max_trajectory_age_steps|weight_sync_steps",
    ("async", "async_grpo", "async_ppo", "async_rloo"),
)
TOOLS = Topic(
    "Tools",
    "Files that list tools are not read: set tools=file.py:f,g to functions, or environment=file.py:Class to a class "
    "whose public methods are the tools.",
    r"tool_(?:config|call)\w*|function_tool\w*|max_tool_calls?",
)
IMAGES = Topic(
    "Images",
    "Images are not implemented: prompts and responses are text.",
    r"images?|image_\w+|limit_images|vlm|vision|vision_\w+|freeze_vision\w*|multi_?modal\w*|pixel\w*|max_pixels"
    r"|return_multi_modal_inputs|mm_processor_kwargs|processor",
    ("vlm",),
)
VIDEO = Topic(
    "Video and audio",
    "Video and audio are not implemented: prompts and responses are text.",
    r"videos?|video_\w+|audios?|audio_\w+",
)
LOW_BIT = Topic(
    "Low precision",
    "Training on quantized weights (QLoRA, 4-bit, 8-bit, FP8) is not implemented.",
    r"load_in_[48]bit|qlora|q?lora_4bit|bnb\w*|bitsandbytes|quantiz\w*|qat|fp8\w*|nf4|gptq|awq|[48]bit|adam_?8bit",
    ("qlora", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adam8bit"),
)
LORA_VARIANTS = Topic(
    "Variants of LoRA",
    "DoRA, rsLoRA, PiSSA, LoftQ and LoRA+ are not implemented: an adapter starts at 0 and has the scale alpha / rank.",
    r"(?:use_)?(?:rs_?lora|dora|loftq)|pissa\w*|init_lora_weights|loftq_config|loraplus\w*|adalora|galore\w*",
    ("dora", "rslora", "pissa", "galore"),
)
NOISE = Topic(
    "Noise in the embeddings",
    "Noise in the embeddings (NEFTune) is not implemented.",
    r"neftune\w*|noisy_embedding\w*",
)
PRETRAINING = Topic(
    "Pretraining",
    "Training on plain text (pretraining) is not implemented: camshaft sft trains on responses.",
    r"pretraining\w*|dataset_text_field|streaming_multipack\w*",
    ("pretrain", "pt", "cpt"),
)
DPO = Topic(
    "DPO",
    "Preference optimization (DPO and its variants) is not implemented.",
    r"dpo\w*|ipo|simpo\w*|orpo\w*|cpo\w*|nash_md|xpo",
    ("dpo", "ipo", "simpo", "orpo", "cpo", "rpo", "online_dpo", "iterative_dpo", "xpo", "nash_md"),
)
KTO = Topic("KTO", "KTO and BCO are not implemented.", r"kto\w*|bco\w*", ("kto", "bco"))
DISTILLATION = Topic(
    "Distillation",
    "Distillation from a teacher model is not implemented.",
    r"distill\w*|teacher\w*|opd|gkd\w*|gold",
    ("distill", "distillation", "gkd", "opd", "on_policy_distillation", "minillm", "kd"),
)
DEEPSPEED = Topic(
    "DeepSpeed",
    "DeepSpeed is not an engine of camshaft.",
    r"deepspeed\w*|ds_\w+|zero|zero_stage|zero3\w*|zpg|adam_offload|overlap_comm",
    ("deepspeed",),
)
JAX = Topic("JAX", "JAX and TPUs are not supported.", r"jax\w*|tpus?|maxtext|tunix")
PROFILERS = Topic(
    "Profilers",
    "Profilers are not started by camshaft; it measures the phases of a step itself.",
    r"\w*profil\w*|nsys\w*|timeline_json_file|memory_snapshot\w*",
    ("profile",),
)
HUB_PUSH = Topic(
    "Uploads",
    "Models are not uploaded to the Hugging Face Hub.",
    r"push_to_hub\w*|hub_(?:model_id|strategy|token|private_repo|always_push|revision)",
    ("push", "upload"),
)
MTP = Topic(
    "Multi-token prediction",
    "Multi-token prediction and speculative decoding are not implemented.",
    r"mtp\w*|speculative\w*|num_nextn\w*|draft_model\w*|eagle\w*",
    ("mtp",),
)
MEGATRON_FSDP = Topic(
    "Megatron-FSDP",
    "Megatron-FSDP is not implemented: strategy=megatron replicates the weights over data-parallel ranks.",
    r"use_megatron_fsdp|megatron_fsdp\w*",
)
MEGATRON_LITE = Topic(
    "Megatron-lite", "Megatron-lite is not an engine of camshaft.", r"m(?:egatron_)?lite\w*|verl_mlite|impl_cfg"
)
MEGATRON_AUX = Topic(
    "Load balancing per sequence",
    "A load-balancing loss of single sequences and Sinkhorn routing are not implemented.",
    r"moe_router_load_balancing_type",
)
UNEVEN_STAGES = Topic(
    "Layouts of pipeline stages",
    "Only the first and the last pipeline stage can have another number of layers than the others.",
    r"account_for_(?:embedding|loss)_in_pipeline_split|pipeline_model_parallel_layout",
)
OTHER_REPLAY = Topic(
    "Router replay of other models",
    "Replay of expert choices is implemented for the actor only.",
    r"(?!)",
)
MEGATRON_OPTIONS = Topic(
    "Other options of Megatron",
    "This option of Megatron is not supported.",
)
MEGATRON_CHECKPOINTS = Topic(
    "Megatron checkpoints",
    "Distributed checkpoints of Megatron are not supported: a model is a Hugging Face folder.",
    r"dist_checkpointing\w*|use_dist_ckpt\w*",
)
VEOMNI = Topic("VeOmni", "VeOmni is not an engine of camshaft.", r"veomni\w*")
AUTOMODEL = Topic("NeMo AutoModel", "NeMo AutoModel is not an engine of camshaft.", r"automodel\w*|nemo\w*")
NPU = Topic(
    "NPU",
    "Ascend NPUs are not supported with vLLM or SGLang.",
    r"npus?|ascend\w*|turbo_config|hccl\w*|mindspeed\w*|context_parallel_algo|use_naive_l2norm",
)
EXPERT_SERVERS = Topic(
    "Expert parallelism over several vLLM engines",
    "A generator that spans several engines (data parallelism with shared experts, pipeline stages, separate prefill "
    "servers) is not implemented.",
    r"disaggregation|decode_replicas|prefill_replicas|rollout_pp",
)
TRTLLM = Topic("TensorRT-LLM", "TensorRT-LLM is not a rollout of camshaft.", r"trt_?llm\w*|tensorrt\w*")
SANDBOX = Topic(
    "Code sandboxes",
    "A sandbox for code that responses contain is not part of camshaft.",
    r"sandbox\w*|code_interpreter|e2b\w*",
)
REWARD_MANAGERS = Topic(
    "Reward managers",
    "Reward managers are not supported. Use scoring functions, a reward model or the overlong penalty.",
    r"reward_(?:manager|loop)\w*",
)
DATASETS = Topic(
    "Data set classes",
    "Data set and sampler classes of other libraries are not supported.",
    r"custom_cls|datagen|sampler|curriculum\w*|class_path",
)
PROCESS_REWARDS = Topic(
    "Process rewards",
    "Process reward models (PRM) are not implemented: a reward model gives a response one score.",
    r"prm|prm_\w+|process_reward\w*|step_rewards?",
    ("prm", "process_reward", "process_reward_model"),
)
PF_PPO = Topic(
    "PF-PPO", "Reweighting of samples by their rewards (PF-PPO) is not implemented.", r"\w*pf_ppo", ("pf_ppo",)
)
TRACES = Topic("Traces of rollouts", "Rollouts are not traced with Weave or MLflow.", r"weave|token2text")
SERVING = Topic(
    "Serving",
    "camshaft has no server for trained models, and no chat.",
    names=("chat", "deploy", "api", "vllm", "sglang", "ollama"),
)
BENCHMARKS = Topic(
    "Benchmark suites",
    "Benchmark suites, such as lm-evaluation-harness, are not part of camshaft.",
    r"lm_eval\w*|lighteval\w*|eval_harness",
    ("lm_eval", "lm_evaluation_harness", "lighteval", "benchmark", "bench"),
)
SYNC_REF = Topic(
    "Moving reference model",
    "A reference model that follows the policy is not implemented.",
    r"sync_ref_model|ref_model_(?:mixup_alpha|sync_steps)|enable_ema|ema_beta",
)

TOPICS = (
    STREAM, TOOLS, IMAGES, VIDEO, LOW_BIT, LORA_VARIANTS, NOISE, PRETRAINING, DPO, KTO,
    DISTILLATION, PF_PPO, SYNC_REF, DEEPSPEED, JAX, NPU, VEOMNI, AUTOMODEL, MEGATRON_FSDP, MEGATRON_LITE, MEGATRON_AUX,
    UNEVEN_STAGES, OTHER_REPLAY, MEGATRON_CHECKPOINTS, MEGATRON_OPTIONS, MTP, EXPERT_SERVERS, TRTLLM,
    REWARD_MANAGERS, PROCESS_REWARDS, SANDBOX, DATASETS, PROFILERS, TRACES, HUB_PUSH, SERVING, BENCHMARKS,
)  # fmt: skip
"""All topics, in the order of `PAGE`."""


def topic_of_key(key: str) -> Topic | None:
    """Return the topic that a part of an unknown key names. A later part of the key is more specific."""
    for part in reversed(re.split(r"[./]", key.lower().replace("-", "_"))):
        for topic in TOPICS:
            if re.fullmatch(topic.keys, part):
                return topic
    return None


def topic_of_name(name: str) -> Topic | None:
    """Return the topic that the name of a command or of an algorithm names."""
    name = name.lower().replace("-", "_")
    return next((topic for topic in TOPICS if name in topic.names), None)
