"""Serve apcore modules to AI agents: as an MCP server, or as OpenAI tool definitions.

    from apcore_mcp import discover, serve, to_openai_tools

    registry = discover("extensions")  # an apcore Registry of the modules in that directory

    serve(registry)                    # a complete MCP server: every module is a tool
    tools = to_openai_tools(registry)  # or the same modules for OpenAI's API

Without Python: `python -m apcore_mcp --extensions-dir ./extensions`.
`core.py` is the bridge; what stands beside it says what it is in its first lines.
"""

__version__ = "1.0.0"

from .approval import ElicitationApprovalHandler
from .context import MCP_ELICIT_KEY, MCP_PROGRESS_KEY, elicit, report_progress
from .core import MCPServer, async_serve, serve
from .discovery import discover
from .openai import from_openai_call, from_openai_name, run_openai_call, to_openai_tools

__all__ = ["MCPServer", "async_serve", "discover", "from_openai_call", "from_openai_name", "serve", "to_openai_tools"]
# What a module may use, which stays callable without a server.
__all__ += ["MCP_ELICIT_KEY", "MCP_PROGRESS_KEY", "ElicitationApprovalHandler", "elicit", "report_progress"]
__all__ += ["__version__", "run_openai_call"]
