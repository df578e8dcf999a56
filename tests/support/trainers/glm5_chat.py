"""A harness for verifiers: one model call a turn, in this process, without a program that the network would be asked
for. Every call goes through the interception, as verifiers' contract wants."""

import httpx
import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.runtimes import ProgramResult


class Glm5ChatConfig(HarnessConfig):
    pass


class Glm5Chat(vf.Harness[Glm5ChatConfig]):
    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
        messages += [turn if isinstance(turn, dict) else turn.model_dump(exclude_none=True) for turn in turns]
        body, headers = {"model": ctx.model, "messages": messages}, {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(trust_env=False, timeout=300) as client:
            (await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)).raise_for_status()
        return ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Glm5Chat"]
