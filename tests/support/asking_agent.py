"""An agent for `glm5 rl`: asks the policy through Anthropic's messages or OpenAI's chat completions, by its argument.

It asks once, then asks again to check what was said, and answers with the first reply.
"""

import json
import os
import sys
import urllib.request


def post(url: str, body: dict, headers: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def anthropic(messages: list) -> str:
    headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "anthropic-version": "2023-06-01"}
    body = {"model": "policy", "max_tokens": 50, "messages": messages}
    blocks = post(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", body, headers)["content"]
    return "".join(block["text"] for block in blocks if block["type"] == "text")


def chat(messages: list) -> str:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    body = {"model": "policy", "messages": messages, "temperature": 0.1}
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return answer["choices"][0]["message"]["content"] or ""


def main() -> None:
    ask = {"anthropic": anthropic, "chat": chat}[sys.argv[1]]
    messages = json.load(sys.stdin)["messages"]
    said = ask(messages)
    if "twice" in sys.argv:
        ask([*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "sure?"}])
    if "fails" in sys.argv:
        sys.exit("no idea")
    print(said)


if __name__ == "__main__":
    main()
