"""A conversation as a path of its rollout's tree, and what is done where it grows long (`[rollouts.context]`).

    question, reply, results, reply, results, ...        a step is a reply with calls, and the tools' results

Each way to shorten it begins a branch at the last segment that stays as it was. Replies that are on it again are copied
as they were sampled, as context: each is trained in the segment where it was sampled, and nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from glm5.config.rl import Rollouts
from glm5.rl.environments.protocol import Message, with_system
from glm5.rl.rollout import Rollout
from glm5.rl.rollouts.chat import TokenChat
from glm5.rl.segments import Segment

OMITTED = "Tool result is omitted to save tokens."
"""The report's text (section 4.2.4)."""
REQUEST = "The context is nearly full. Summarize what was asked, what you found and what is left to do; call no tool."
GO_ON = "The conversation so far is replaced by your summary. Go on with the task."


@dataclass
class _Step:
    """Segments of a reply and of what its tools said, and that as messages."""

    reply: int
    results: int
    messages: Sequence[Message]
    is_folded: bool = False


class Conversation:
    """Of one player. `token_ids`: of the path to `leaf`, the next prompt. `num_calls`: of all replies."""

    def __init__(self, rollout: Rollout, chat: TokenChat, cfg: Rollouts) -> None:
        self.rollout, self.token_ids, self.leaf, self.num_calls = rollout, list[int](), -1, 0
        self._chat, self._tools, self._cfg = chat, rollout.task.tools, cfg
        self._base, self._steps, self._num_steps, self._summaries = -1, list[_Step](), 0, list[int]()

    def add(self, segment: Segment) -> int:
        """Add a segment without a parent after the leaf; returns its index."""
        segment.parent = None if self.leaf < 0 else self.leaf
        self.leaf = self.rollout.tree.add(segment)
        self.token_ids += segment.token_ids
        return self.leaf

    def hear(self, messages: Sequence[Message], prompt: Sequence[int] = ()) -> None:
        """Add what the environment says, and shorten the conversation where that needs no reply of the policy.
        `prompt`: the tokens of a first prompt, where they are known already."""
        reply = self.leaf
        if reply < 0:
            messages = with_system(self._cfg.system, messages)
            self.add(Segment(list(prompt or self._chat.prompt(messages, self._tools))))
        else:
            self._tell(messages)
        self.rollout.messages += messages
        if any(one["role"] != "tool" for one in messages):
            self._base, self._steps = self.leaf, []
            return
        self._steps.append(_Step(reply, self.leaf, messages))
        self._num_steps += 1
        context = self._cfg.context
        if context is not None and context.keep_recent is not None:
            self._fold(context.keep_recent, context.fold_at)
        if context is not None and context.discard_above is not None and len(self.token_ids) > context.discard_above:
            self._go_to(self._base)
            self._steps = []

    @property
    def needs_summary(self) -> bool:
        """Whether the policy is to write a summary before it goes on."""
        context = self._cfg.context
        if context is None or len(self._summaries) >= context.max_compactions or not self._steps:
            return False
        if context.compact_every is not None:
            return self._num_steps % context.compact_every == 0
        return self._cfg.max_model_len - len(self.token_ids) < (context.compact_below or 0)

    def ask_summary(self) -> None:
        """Ask for a summary, in the message after the last results."""
        asked = {"role": "user", "content": REQUEST}
        self._go_to(self._steps[-1].reply)
        self._tell([*self._steps[-1].messages, asked])
        self.rollout.messages.append(asked)

    def resume(self) -> None:
        """Go on from the summary, which has just been added: the question, the summary as it was sampled, and as many
        of the last steps as fit."""
        context = self._cfg.context
        assert context is not None
        summary, told = self.leaf, {"role": "user", "content": GO_ON}
        self._summaries.append(summary)
        self._go_to(self._base)
        self._copy(summary)
        self._tell([told])
        self.rollout.messages.append(told)
        room = self._cfg.max_model_len - len(self.token_ids) - (context.compact_below or 0)
        self._steps = self._steps[max(0, len(self._steps) - context.keep_steps) :]
        while self._steps and sum(self._size(one.reply) + self._size(one.results) for one in self._steps) > room:
            self._steps = self._steps[1:]
        for step in self._steps:
            step.reply, step.results = self._copy(step.reply), self._copy(step.results)

    def close(self) -> None:
        """At the end of the episode: leave out what no reply follows, and count. Summaries that are not to be trained
        become context."""
        context, tree = self._cfg.context, self.rollout.tree
        if context is not None and not context.train_summary:
            for index in self._summaries:
                tree.segments[index] = Segment(tree.segments[index].token_ids, tree.segments[index].parent)
        if context is not None and tree.num_sampled:
            tree = self.rollout.tree = tree.trained()
            computed = sum(len(one.token_ids) for one in tree.segments)
            self.rollout.metrics["forks"] = float(len(tree.leaves()) - 1)
            self.rollout.metrics["computed_per_trained"] = computed / tree.num_sampled

    def _fold(self, keep: int, fold_at: int) -> None:
        first = next(number for number, step in enumerate(self._steps) if not step.is_folded)
        if len(self._steps) - first < fold_at:
            return
        self._go_to(self._steps[first].reply)
        for number, step in enumerate(self._steps[first:], first):
            if number > first:
                step.reply = self._copy(step.reply)
            if number < len(self._steps) - keep:
                step.results, step.is_folded = self._tell([{**one, "content": OMITTED} for one in step.messages]), True
            else:
                step.results = self._copy(step.results)

    def _tell(self, messages: Sequence[Message]) -> int:
        return self.add(Segment(list(self._chat.continuation(messages, self._tools, self.token_ids[-1]))))

    def _copy(self, segment: int) -> int:
        """Add the tokens of a segment again, as context."""
        return self.add(Segment(list(self.rollout.tree.segments[segment].token_ids)))

    def _size(self, segment: int) -> int:
        return len(self.rollout.tree.segments[segment].token_ids)

    def _go_to(self, leaf: int) -> None:
        self.leaf, self.token_ids = leaf, self.rollout.tree.token_ids(leaf)
