"""Who new files belong to. Curvine keeps names of users and groups, and asks nobody whether they exist."""

from __future__ import annotations

import grp
import os
import pwd


def own_names() -> tuple[str, str]:
    """User and group of this process, by name where they have one, else their numbers as text."""
    user, group = os.geteuid(), os.getegid()
    try:
        owner = pwd.getpwuid(user).pw_name
    except KeyError:
        owner = str(user)
    try:
        return owner, grp.getgrgid(group).gr_name
    except KeyError:
        return owner, str(group)
