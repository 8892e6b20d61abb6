"""A round of tools: the model calls a function, gets its result, and puts the answer into a form.

python examples/tools.py [agent]
"""

from __future__ import annotations

import json
import sys

from kvd_client import Client

CITIES = {"Paris": 18, "Rome": 24}
WEATHER = {
    "type": "function",
    "function": {
        "name": "temperature",
        "description": "The temperature in a city, in degrees Celsius",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": sorted(CITIES)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
FORM = {
    "type": "object",
    "properties": {"city": {"enum": sorted(CITIES)}, "celsius": {"type": "integer", "minimum": -50, "maximum": 60}},
    "required": ["city", "celsius"],
    "additionalProperties": False,
}


def main(agent: str = "example-tools") -> None:
    """One call, its result, and the answer; the second turn finds all of the first computed."""
    messages: list[dict[str, object]] = [{"role": "user", "content": "How warm is it in Rome?"}]
    with Client() as client:
        asked = client.chat(agent, messages, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
        message = asked.message or {}
        for call in message["tool_calls"]:
            city = json.loads(call["function"]["arguments"])["city"]
            print(f"{call['function']['name']}({city}) -> {CITIES[city]}")
            result = {"role": "tool", "tool_call_id": call["id"], "content": str(CITIES[city])}
            messages += [dict(message), result]
        form = {"type": "json_schema", "json_schema": {"schema": FORM}}
        said = client.chat(agent, messages, tools=[WEATHER], tool_choice="none", response_format=form)
        print(json.dumps(json.loads(said.text)))
        print(f"[{said.match}: {said.cached_tokens} of {said.prompt_tokens} prompt tokens reused]")


if __name__ == "__main__":
    main(*sys.argv[1:])
