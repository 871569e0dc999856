"""A check of the two servers: pages of other sites may not ask them."""

import re

from fastapi import HTTPException, Request


def check(request: Request, host: str) -> None:
    """Refuse what a page of another site sends: it has the site's origin, or a name of its own for us.

    `host` is the server's name in requests, besides "localhost".
    """
    ours, origin = request.headers.get("host", ""), request.headers.get("origin")
    known = re.sub(r":\d+$", "", ours).strip("[]") in ("localhost", "127.0.0.1", "::1", host)
    if not known or origin not in (None, f"http://{ours}", f"https://{ours}"):
        raise HTTPException(403, f"got host {ours!r} and origin {origin!r}: ask by localhost, or the --host")
