"""Refuses to be imported: there is no authentication here.

Packages that build on apcore-mcp ask this module for an authenticator when they are given a secret, and serve without
any where it does not exist. An ImportError would be taken for that, so it is another error that stops them.
"""

raise RuntimeError(
    "apcore-mcp does not authenticate requests: put ASGI middleware that does before the server"
    " (middleware=[starlette.middleware.Middleware(...)] of serve(), MCPServer and async_serve()), and whoever it"
    " authenticates is the caller that an ACL sees. Nothing is served without the authentication asked for."
)
