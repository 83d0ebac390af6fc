"""Checks `cargo metadata` against the bans, licences and sources in `deny.toml`. The check takes a second and needs only cargo.

This module reads the same policy as cargo-deny. It refuses every crate whose name, licence or source cargo-deny would refuse, including
dev-dependencies. An unknown setting is an error, so that no setting is silently ignored. Only cargo-deny checks advisories.
"""

import json
import re
import subprocess

CRATES_IO = ("registry+https://github.com/rust-lang/crates.io-index", "sparse+https://index.crates.io/")
# The supported settings, each with its supported values. The first value is the default. None stands for any list.
KNOWN = {
    "graph": {"targets": None},
    "licenses": {"allow": None, "unused-allowed-license": ("allow",)},
    "bans": {"multiple-versions": ("allow",), "wildcards": ("deny",), "allow-wildcard-paths": (True,), "deny": None},
    "sources": {"unknown-registry": ("deny",), "unknown-git": ("deny",)},
}
# Sections that only cargo-deny reads.
ELSEWHERE = ("advisories",)
TOKEN = re.compile(r"\s*([()]|[A-Za-z0-9.+:-]+|/)")


class PolicyError(Exception):
    """The policy or a licence cannot be read, or the policy has an unsupported setting."""


def load_toml(path):
    try:
        import tomllib
    except ImportError:
        # Python versions before 3.11 have no tomllib. pip contains the same parser under the name tomli, and the set-up needs pip anyway.
        try:
            from pip._vendor import tomli as tomllib
        except ImportError:
            raise PolicyError("no TOML reader found; install Python 3.11 or newer, or a pip newer than 21.2") from None
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PolicyError("%s: %s" % (path, error)) from None


def load_policy(path):
    """Reads the policy. A setting that this module does not enforce is an error."""
    policy = load_toml(path)
    for section, settings in policy.items():
        if section in ELSEWHERE:
            continue
        for key in settings if isinstance(settings, dict) and section in KNOWN else [""]:
            if key not in KNOWN.get(section, {}):
                raise PolicyError("%s: `%s` is not enforced; implement it in setup/policy.py" % (path.name, (section + "." + key).strip(".")))
    for section, settings in KNOWN.items():
        for key, values in settings.items():
            value = policy.get(section, {}).get(key, [] if values is None else values[0])
            if not isinstance(value, list) if values is None else value not in values:
                wanted = "a list" if values is None else " or ".join(map(repr, values))
                raise PolicyError("%s: `%s.%s` is %r, wanted %s" % (path.name, section, key, value, wanted))
            policy.setdefault(section, {})[key] = value
    if any(not isinstance(entry, dict) or set(entry) != {"crate"} for entry in policy["bans"]["deny"]):
        raise PolicyError("%s: entries of `bans.deny` must have the form { crate = NAME }" % path.name)
    return policy


# --- licence expressions (SPDX, and the `/` of old manifests) --------------------------------------------


def tokens_of(expression):
    position, tokens = 0, []
    while expression[position:].strip():
        match = TOKEN.match(expression, position)
        if not match:
            raise PolicyError("cannot read the licence `%s`" % expression)
        tokens.append("OR" if match.group(1) == "/" else match.group(1))
        position = match.end()
    return tokens


class Licence:
    """A licence expression, evaluated against the allowed licences."""

    def __init__(self, expression, allowed):
        self.expression, self.allowed = expression, allowed
        self.tokens = tokens_of(expression)

    def is_allowed(self):
        answer = self.either()
        if self.tokens:
            raise PolicyError("cannot read the licence `%s`" % self.expression)
        return answer

    def next_is(self, *expected):
        return bool(self.tokens) and self.tokens[0] in expected

    def take(self):
        if not self.tokens:
            raise PolicyError("cannot read the licence `%s`" % self.expression)
        return self.tokens.pop(0)

    def either(self):
        answers = [self.both()]
        while self.next_is("OR"):
            self.take()
            answers.append(self.both())
        return any(answers)

    def both(self):
        answers = [self.one()]
        while self.next_is("AND"):
            self.take()
            answers.append(self.one())
        return all(answers)

    def one(self):
        word = self.take()
        if word == "(":
            answer = self.either()
            if self.take() != ")":
                raise PolicyError("cannot read the licence `%s`" % self.expression)
            return answer
        if word in ("OR", "AND", "WITH", ")"):
            raise PolicyError("cannot read the licence `%s`" % self.expression)
        if self.next_is("WITH"):
            word = "%s %s %s" % (word, self.take(), self.take())
        return word in self.allowed


# --- the checks ------------------------------------------------------------------------------------------


def metadata(project, targets):
    """Returns the `cargo metadata` of all crates that the targets need."""
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    command += [word for target in targets for word in ("--filter-platform", target)]
    result = subprocess.run(command, cwd=project, stdout=subprocess.PIPE, universal_newlines=True)
    if result.returncode != 0:
        raise PolicyError("`%s` exited with %d" % (" ".join(command), result.returncode))
    whole = json.loads(result.stdout)
    wanted = {node["id"] for node in whole["resolve"]["nodes"]}
    return [package for package in whole["packages"] if package["id"] in wanted]


def refusals_of(package, policy):
    """Yields the reasons why the policy refuses a crate. Yields nothing if the crate is allowed."""
    if any(entry["crate"] == package["name"] for entry in policy["bans"]["deny"]):
        yield "is banned by `bans.deny`"
    for dependency in package["dependencies"]:
        if dependency["req"] == "*" and not dependency.get("path"):
            yield "accepts any version of `%s`; name a version" % dependency["name"]
    if not package["license"]:
        yield "has no licence"
    elif not Licence(package["license"], policy["licenses"]["allow"]).is_allowed():
        yield "has the licence `%s`, which is not in `licenses.allow`" % package["license"]
    if package["source"] is not None and package["source"] not in CRATES_IO:
        yield "comes from %s, not from crates.io" % package["source"]


def check(project):
    """Returns the number of crates checked, and a line for each reason to refuse a crate."""
    policy = load_policy(project / "deny.toml")
    packages = metadata(project, policy["graph"]["targets"])
    refusals = ["%s %s %s" % (package["name"], package["version"], reason) for package in packages for reason in refusals_of(package, policy)]
    return len(packages), refusals
