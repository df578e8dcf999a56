"""What the tests of the load generator share: a client of a scripted server, in virtual time."""

from glm5.bench.serve.api_formats import DIALECTS, RequestParams
from glm5.bench.serve.client import Client
from glm5.bench.serve.http import Address, Pool
from glm5.bench.serve.load import Outcome, Plan, run
from glm5.bench.serve.workload import Conversation, Turn
from tests.support.scripted_server import in_memory
from tests.support.virtual_time import virtual_time

ASKING = RequestParams("m", 0.0, None, ignore_eos=True, extra={})


async def client_of(handler, backend="openai", timeout=3600.0) -> Client:
    pool = Pool(await in_memory(handler)())
    return Client(pool, Address.of("http://x"), DIALECTS[backend](ASKING), timeout=timeout)


def single(num, max_tokens=4) -> list[Conversation]:
    """Conversations of one request each, told apart by their prompts "0", "1", ..."""
    return [Conversation([Turn(str(number), max_tokens)]) for number in range(num)]


def run_virtually(handler, plan: Plan, backend="openai", timeout=3600.0) -> Outcome:
    async def main():
        return await run(await client_of(handler, backend, timeout), plan)

    with virtual_time() as runner:
        return runner.run(main())
