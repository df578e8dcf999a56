"""The program of TRL's side: PYTHON -P trl_run.py JOB, in an environment that has TRL and need not have this package.

Of this package it imports the environments alone, which need nothing beside Python: tasks and rewards are the same.
It writes metrics.jsonl as `glm5 rl` does, after a line of step 0 when training begins.

    time/rollout   prompts to tokens, generation, tokens to text, rewards and advantages
    time/train     the rest of the step: forward and backward passes, and the optimizer
"""

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

BACKENDS: dict[str, dict[str, Any]] = {
    "generate, dynamic cache": {},
    "generate, static cache": {"cache_implementation": "static"},
    "continuous batching": {"use_transformers_continuous_batching": True},
}


def main(job: dict[str, Any]) -> None:
    """Train as the job says."""
    sys.path.append(job["package"])  # behind the packages of this interpreter
    torch, transformers, trl, datasets = map(import_module, ("torch", "transformers", "trl", "datasets"))
    protocol, table = (import_module(f"glm5.rl.environments.{name}") for name in ("protocol", "table"))
    recipe, config = job["recipe"], trl.GRPOConfig(**settings(job["recipe"], job["choice"]))
    torch.set_num_threads(recipe["threads"])
    environment, checkpoint = table.make(recipe["environment"][0]["name"]), recipe["model"]["checkpoint"]
    tasks = [environment.task(seed, level) for seed, level in job["tasks"]]
    system = recipe["rollouts"]["system"]
    rows = [
        {"prompt": protocol.with_system(system, task.messages), "task": number} for number, task in enumerate(tasks)
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    options = {"add_generation_prompt": True, "return_dict": True, **config.chat_template_kwargs}
    prompt = list(tokenizer.apply_chat_template(rows[0]["prompt"], **options)["input_ids"])
    if prompt != job["first_prompt"]:
        sys.exit(f"the first prompt has other tokens here: {prompt}, and there {job['first_prompt']}")
    line: dict[str, float] = {}

    def write(line: dict[str, float]) -> None:
        file.write(json.dumps(line) + "\n")
        file.flush()

    def reward(completions: list[Any], task: list[int], **_: Any) -> list[float]:
        said = [protocol.Reply(completion[0]["content"]) for completion in completions]
        turns = [environment.reset(tasks[number]).step(reply) for number, reply in zip(task, said, strict=True)]
        return [sum(turn.rewards.values()) for turn in turns]

    class Trainer(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began = time.monotonic()
            found = super()._generate_and_score_completions(inputs)
            seconds, sampled = time.monotonic() - began, int(found["completion_mask"].sum())
            line.update({"reward/mean": self._metrics["train"]["reward"][-1], "time/rollout": seconds})
            line.update({"perf/rollout_tok_s": sampled / seconds, "tokens": sampled + int(found["prompt_mask"].sum())})
            return found

    class Lines(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            write({"step": 0})

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.monotonic()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            seconds = time.monotonic() - self.began
            train = seconds - line["time/rollout"]
            line.update({"time/step": seconds, "time/train": train, "perf/train_tok_s": line["tokens"] / train})
            write({"step": state.global_step, **line})

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    data = {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer, "callbacks": [Lines()]}
    with (Path(recipe["out"]) / "metrics.jsonl").open("w") as file:
        Trainer(model, reward_funcs=[reward], args=config, **data).train()


def settings(recipe: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    """Those of trl.GRPOConfig that do what the recipe says."""
    rollouts, optimizer = recipe["rollouts"], recipe["optimizer"]
    return {
        "output_dir": recipe["out"],
        "seed": recipe["seed"],
        "max_steps": recipe["steps"],
        "num_generations": rollouts["group_size"],
        "per_device_train_batch_size": choice["micro_batch"],
        "gradient_accumulation_steps": rollouts["groups"] * rollouts["group_size"] // choice["micro_batch"],
        "max_completion_length": rollouts["max_tokens"],
        "temperature": rollouts["temperature"],
        "top_k": 0,
        "top_p": 1.0,
        "chat_template_kwargs": {"enable_thinking": rollouts["enable_thinking"], "clear_thinking": False},
        "shuffle_dataset": False,
        "loss_type": "grpo",
        "scale_rewards": "group",
        "beta": 0.0,
        "optim": "adamw_torch_fused",
        "learning_rate": recipe["lr"],
        "lr_scheduler_type": "constant",
        "adam_beta1": optimizer["betas"][0],
        "adam_beta2": optimizer["betas"][1],
        "adam_epsilon": optimizer["eps"],
        "weight_decay": 0.0,
        "max_grad_norm": optimizer["max_grad_norm"] or 0.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": recipe["steps"],
        **BACKENDS[choice["backend"]],
    }


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
