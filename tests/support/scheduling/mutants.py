"""Schedulers with one rule broken: the controls of every invariant. Each is a change of a line or two of the source.

A mutant that `World` does not notice means that an invariant is not checked, or never at stake.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from glm5.engine.scheduler.scheduler import Scheduler

# In the order of their imports: each is executed anew, against those before.
MODULES = {
    "pages": "cache.pages",
    "prefix": "cache.prefix",
    "config": "scheduler.config",
    "sequence": "scheduler.sequence",
    "transfers": "scheduler.transfers",
    "page_manager": "scheduler.page_manager",
    "scheduler": "scheduler.scheduler",
}


@dataclass(frozen=True)
class Mutant:
    """`rule`: what is broken. `old` stands once in the module's source and becomes `new`."""

    rule: str
    module: str
    old: str
    new: str

    def scheduler(self) -> type[Scheduler]:
        """The broken class; the real modules stay as they are."""
        names = [f"glm5.engine.{path}" for path in MODULES.values()]
        real = {name: sys.modules[name] for name in names}
        try:
            for module, name in zip(MODULES, names, strict=True):
                source = Path(str(real[name].__file__)).read_text(encoding="utf-8")
                if module == self.module:
                    assert source.count(self.old) == 1, f"{self.rule}: {self.old!r} is not in {module}.py once"
                    source = source.replace(self.old, self.new)
                # dataclasses look their module up while it is executed.
                sys.modules[name] = broken = ModuleType(name)
                exec(compile(source, f"{name} with {self.rule}", "exec"), broken.__dict__)
            return sys.modules["glm5.engine.scheduler.scheduler"].Scheduler
        finally:
            sys.modules.update(real)


MUTANTS = [
    # Budget and shares
    Mutant(
        "budget forgets drafts",
        "scheduler",
        "plan.num_tokens, plan.depth = sum(in_flight.gains),",
        "plan.num_tokens, plan.depth = len(in_flight.gains),",
    ),
    Mutant("budget is not used up", "scheduler", "budget -= shares[-1][1]\n        while", "pass\n        while"),
    Mutant(
        "drafts may fill more than a step",
        "scheduler",
        "return max(0, min(self.depth, budget // len(self.decoding) - 1))",
        "return self.depth",
    ),
    Mutant("one prompt takes it all", "scheduler", "half = min(chunk, max(1,", "half = max(chunk, max(1,"),
    Mutant(
        "those that decode bear anything",
        "scheduler",
        "prompt_budget(self.max_prompt_tokens if",
        "prompt_budget(None if",
    ),
    Mutant("half of a step beside others too", "scheduler", "max(1, most // 2)", "max(1, budget)"),
    Mutant("the rest goes to one while others wait", "scheduler", " and not self.waiting:", ":"),
    Mutant("chunks of any size", "scheduler", "min(seq.goal - seq.computed, max(count, chunk), ", "min(10**6, "),
    # Order
    Mutant(
        "last come, first served",
        "scheduler",
        "rank = (submit.priority, self._num_arrived)",
        "rank = (submit.priority, -self._num_arrived)",
    ),
    Mutant("priority is ignored", "scheduler", "rank = (submit.priority,", "rank = (0,"),
    Mutant(
        "preempted ones queue up at the end",
        "scheduler",
        "insort(self.waiting, seq, key=_rank)\n        plan.preempted",
        "self.waiting.append(seq)\n        plan.preempted",
    ),
    Mutant("the oldest is preempted", "scheduler", "return max((queue[-1] for", "return min((queue[0] for"),
    Mutant(
        "short ones overtake",
        "scheduler",
        "            if found.num_short:\n",
        "            if found.num_short:\n                self.waiting.append(self.waiting.pop(0))\n",
    ),
    # Pages
    Mutant("a page is not given back", "page_manager", "reversed(seq.pages)", "reversed(seq.pages[1:])"),
    Mutant(
        "shared pages take no reference",
        "page_manager",
        "            for page in seq.pages:\n                self.pool.ref(page)\n            seq.node",
        "            seq.node",
    ),
    Mutant(
        "pages for the least, not the most",
        "page_manager",
        "need = self.config.pages_for(num_positions) - first",
        "need = self.config.pages_for(num_positions - 1) - first",
    ),
    Mutant(
        "certain lengths only", "scheduler", "seq.max_len = high = high + 1 + drafts", "seq.max_len = high = high + 1"
    ),
    Mutant("accepted tokens are not counted", "scheduler", "seq.min_len += count - 1", "pass"),
    Mutant("bounds never tighten", "scheduler", "seq.max_len += count - gain", "pass"),
    Mutant(
        "no need to hold back while pages are short",
        "page_manager",
        "if need > self.pool.num_available:\n            return False",
        "if need > self.pool.num_available:\n            return True",
    ),
    Mutant("matched idle pages are counted twice", "page_manager", "available -= sum(", "_ = sum("),
    Mutant("page tables are not told of new pages", "page_manager", "self._changed += [", "_ = ["),
    Mutant("page tables are not told of swaps", "page_manager", "self._changed.append((seq, index))", "pass"),
    Mutant(
        "a swapped page is not given back",
        "page_manager",
        "self.pool.unref(page)\n                self._ch",
        "self._ch",
    ),
    # Sharing
    Mutant(
        "unconfirmed pages are shared",
        "page_manager",
        "range(seq.num_in_tree, seq.confirmed // size)",
        "range(seq.num_in_tree, min(seq.covered, len(seq.tokens)) // size)",
    ),
    Mutant("salts are ignored", "prefix", "(len(weights), weights, salt)", '(len(weights), weights, b"")'),
    Mutant("versions are ignored", "prefix", "(len(weights), weights, salt)", '(0, b"", salt)'),
    Mutant(
        "pages of mixed weights are shared",
        "page_manager",
        "forget_prefixes(running, pure=False",
        "forget_prefixes(running, pure=True",
    ),
    Mutant("the last page of a prompt is not copied", "page_manager", "plan.page_copies.append(PageCopy(d", "_ = ((d"),
    Mutant("a partial page is not copied", "page_manager", "plan.page_copies.append(PageCopy(p", "_ = ((p"),
    Mutant("all of a prompt matches a partial page", "prefix", "(token_ids[:-1], len(path))", "(token_ids, len(path))"),
    Mutant("a partial page is not reserved", "page_manager", "not found.lower and num_new < available", "True"),
    Mutant(
        "unconfirmed tokens are in a partial page",
        "page_manager",
        "seq.tokens[start : seq.confirmed], ",
        "seq.tokens[start:], ",
    ),
    Mutant(
        "partial pages of mixed weights are shared",
        "page_manager",
        "if self.config.prefix_cache and seq.is_pure and 0",
        "if self.config.prefix_cache and 0",
    ),
    Mutant(
        "a prompt is shared before it is computed",
        "sequence",
        "if other.decodes and other.is_pure",
        "if other.slot is not None",
    ),
    Mutant(
        "all of a prompt matches",
        "page_manager",
        "(len(seq.tokens) - 1) // self.config.page_size, seq.path)",
        "len(seq.tokens) // self.config.page_size, seq.path)",
    ),
    Mutant("a match that was evicted is believed", "prefix", "while path and not path[-1].is_kept:", "while False:"),
    Mutant(
        "pages in use are evicted",
        "pages",
        "return next(iter(self._idle))",
        "return next(p for p in range(self.num_pages) if self._kept[p])",
    ),
    # Launch-ahead
    Mutant("grammars run ahead", "scheduler", "(seq.needs_last_token and seq.in_flight)", "False"),
    Mutant("certain ends are planned past", "scheduler", "if low >= cap or", "if"),
    Mutant("a preempted one comes back before its step is read", "scheduler", "if seq.in_flight or not", "if not"),
    Mutant(
        "tokens of a preempted one are lost",
        "scheduler",
        "count = len(sampled)\n",
        "count = len(sampled)\n            if seq.slot is None:\n                continue\n",
    ),
    Mutant("answers go on after a stop id", "sequence", 'token_ids, reason = token_ids[:number], "stop"', "pass"),
    Mutant("tokens after the end are delivered", "sequence", "token_ids, reason = token_ids[:room], ", "reason = "),
    Mutant("min_tokens is ignored", "sequence", "if number >= first and", "if"),
    # Tiers
    Mutant(
        "a load does not hold its page", "transfers", "        self.pool.ref(page)\n        copy =", "        copy ="
    ),
    Mutant("a failed load is believed", "transfers", "restore.num_good = min(restore.num_good, load.index)", "pass"),
    Mutant(
        "computing does not wait for loads",
        "scheduler",
        "for seq in self.prompting:\n            if budget and seq.restore is None and not seq.is_full(left):",
        "for seq in self.prompting:\n            if budget and not seq.is_full(left):",
    ),
    Mutant("loads of who left go on", "page_manager", "self.transfers.cancel(seq.restore)", "pass"),
    Mutant("an ended copy keeps its page", "transfers", "self.pool.unref(store.page)", "pass"),
    # Sessions
    Mutant("sessions share with each other", "prefix", 'b"session:%b" % salt', 'b"session:"'),
    Mutant(
        "anyone finds the pages of sessions",
        "page_manager",
        "if seq.submit.keeps_pages else cache",
        "if True else cache",
    ),
    Mutant("keys of any age are found", "page_manager", "][-1 - message.max_key_age :]", "]"),
    Mutant("keys may be an update too old", "page_manager", "[-1 - message", "[-2 - message"),
    Mutant("pages of sessions leave the device", "page_manager", "> num_nodes and not versions:", "> num_nodes:"),
    Mutant(
        "an older page takes the place of the own one", "page_manager", "if node.versions != versions:", "if False:"
    ),
    Mutant("a copied page is told as new", "page_manager", "seq.key_versions += partial.versions", "pass"),
    Mutant(
        "pages found are told as new",
        "page_manager",
        "[version for node in seq.path for version in node.versions]",
        "[]",
    ),
    Mutant("a shared prompt is told as new", "page_manager", "donor.key_versions[: seq.num_prompt - 1]", "[]"),
    Mutant("kept pages are told as new", "page_manager", "self._rekeyed += running", "pass"),
    Mutant(
        "pages that are computed again are told as old",
        "page_manager",
        "if seq.key_versions or had_versions:",
        "if seq.key_versions:",
    ),
    Mutant(
        "a page is told as old in the tree alone", "page_manager", "known = seq.key_versions[start:end]", "known = []"
    ),
    # Progress
    Mutant("room is kept even when nobody runs", "scheduler", " if self.prompting or self.decoding else 0", " + 1"),
    Mutant("who waits for a prompt is forgotten", "scheduler", "self._to_wake.append(seq.group)", "pass"),
    Mutant(
        "who waits for a lost prompt is forgotten",
        "scheduler",
        "seq.slot, seq.decodes, seq.item = None, False, None\n        self._wake(seq.group)",
        "seq.slot, seq.decodes, seq.item = None, False, None",
    ),
    Mutant("prompts of old weights are shared", "sequence", "if other.decodes and other.is_pure", "if other.decodes"),
    Mutant("new weights, old keys", "scheduler", "if recompute:", "if False:"),
    Mutant("a pause keeps the pages", "scheduler", "if release:", "if False:"),
    Mutant("the tree outlives its pages", "prefix", "for node in list(self._node_of.values()):", "for node in []:"),
    Mutant(
        "a prompt that must be computed is not",
        "page_manager",
        "not (seq.submit.computes_prompt and seq.is_fresh)",
        "True",
    ),
    Mutant("rows stay with a slot that was left", "scheduler", "seq.item = None, False, None", "_ = None, False, None"),
    Mutant("slots are lost", "scheduler", "heappush(self._free_slots, seq.slot)", "pass"),
    Mutant("a pause is ignored", "scheduler", "self.is_paused = True", "pass"),
    Mutant("aborts of waiting ones leave them in the queue", "scheduler", "self.waiting.remove(seq)", "pass"),
    Mutant(
        "plans depend on more than messages",
        "scheduler",
        "= self._common_depth(), False, 0",
        "= min(self._common_depth(), id(self) // 64 % 5), False, 0",
    ),
]
