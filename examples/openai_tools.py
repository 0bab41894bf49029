"""Tools for OpenAI's API, and the call that a model sends back. Run: python examples/openai_tools.py

Nothing here needs the `openai` package or a network: the model's answer is a recorded one.
"""

import asyncio
import json
from pathlib import Path

from apcore import Executor, Registry

from apcore_mcp import from_openai_call, run_openai_call, to_openai_tools

EXTENSIONS = Path(__file__).parent / "extensions"
# What `client.chat.completions.create(..., tools=tools)` brought back in `choices[0].message.tool_calls[0].function`.
# In strict mode a model has to name every property, so it writes null for what it leaves out.
RECORDED = {"name": "text-analyze", "arguments": '{"text": "The cat sat. The dog did not!", "top": null}'}


async def main() -> None:
    registry = Registry(extensions_dirs=[str(EXTENSIONS / name) for name in ("finance", "text")])
    registry.discover()

    tools = to_openai_tools(registry, strict=True, embed_annotations=True)
    print(json.dumps(tools, indent=2))

    # What the next request holds: {"role": "tool", "tool_call_id": call.id, "content": output}. In the Responses API
    # `name` and `arguments` stand on the item itself, and its answer is
    # {"type": "function_call_output", "call_id": item.call_id, "output": output}.
    output = await run_openai_call(Executor(registry), RECORDED["name"], RECORDED["arguments"])
    module_id, inputs = from_openai_call(registry, RECORDED["name"], RECORDED["arguments"])
    print(f"\nThe model calls {RECORDED['name']} with {RECORDED['arguments']}")
    print(f"That is {module_id} with {inputs}, and the model is told\n{output}")


if __name__ == "__main__":
    asyncio.run(main())
