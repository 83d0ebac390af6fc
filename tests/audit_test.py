"""Tests of the dependency audit through its command line, with the real cargo and `deny.toml` but tiny local crates."""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(PROJECT / "setup"))
import policy  # noqa: E402 (the lines above must come first)

MANIFEST = '[package]\nname = "%s"\nversion = "0.1.0"\nedition = "2021"\n%s\n\n[dependencies]\n%s\n'


class AuditTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="locdiff-audit-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.root = self.write_crate("project")
        shutil.copy(PROJECT / "deny.toml", self.root)

    def write_crate(self, name, licence='license = "MIT"', dependencies=""):
        (self.folder / name / "src").mkdir(parents=True, exist_ok=True)
        (self.folder / name / "src/lib.rs").touch()
        (self.folder / name / "Cargo.toml").write_text(MANIFEST % (name, licence, dependencies))
        return self.folder / name

    def cargo(self, *arguments):
        """Runs cargo offline, because the local crates need no registry."""
        subprocess.run(["cargo", *arguments, "--offline", "--quiet"], cwd=self.root, check=True)

    def depend_on(self, dependency):
        self.write_crate("project", dependencies=dependency)
        self.cargo("generate-lockfile")

    def change_policy(self, old, new):
        path = self.root / "deny.toml"
        self.assertIn(old, path.read_text())
        path.write_text(path.read_text().replace(old, new))

    def assert_refused(self, *parts):
        command = [sys.executable, str(PROJECT / "setup/audit.py"), "--installed", "--root", str(self.root)]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, timeout=60)
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertNotIn("Traceback", result.stdout)
        for part in parts:
            self.assertIn("audit: " + part, result.stdout)

    def test_allowed_crates_pass(self):
        self.write_crate("helper", 'license = "(MIT OR GPL-3.0) AND Unicode-3.0"')
        self.depend_on('helper = { path = "../helper" }')
        self.assertEqual(policy.check(self.root), (2, []))

    def test_forbidden_licence_is_refused(self):
        self.write_crate("copyleft", 'license = "GPL-3.0-only"')
        self.depend_on('copyleft = { path = "../copyleft" }')
        self.assert_refused("copyleft 0.1.0 has the licence `GPL-3.0-only`, which is not in `licenses.allow`")
        self.change_policy('"MIT",', '"MIT", "GPL-3.0-only",')
        self.assertEqual(policy.check(self.root), (2, []))

    def test_missing_licence_is_refused(self):
        self.write_crate("unlicensed", "")
        self.depend_on('unlicensed = { path = "../unlicensed" }')
        self.assert_refused("unlicensed 0.1.0 has no licence", "bans, licences, sources of 2 crates: 1 refused by deny.toml")

    def test_banned_crate_is_refused_if_a_target_needs_it(self):
        self.write_crate("openssl-sys")
        self.depend_on("\n[target.'cfg(windows)'.dependencies]\n" + 'openssl-sys = { path = "../openssl-sys" }')
        self.assertEqual(policy.check(self.root), (1, []))
        self.depend_on('openssl-sys = { path = "../openssl-sys" }')
        self.assert_refused("openssl-sys 0.1.0 is banned by `bans.deny`")

    def test_git_source_and_wildcard_are_refused(self):
        crate = self.write_crate("elsewhere")
        git = ["git", "-C", str(crate), "-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
        for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a crate"]):
            subprocess.run(git + arguments, check=True)
        # Let cargo clone the git repository of `elsewhere` into the temporary folder.
        os.environ["CARGO_HOME"] = str(self.folder / "cargo-home")
        self.addCleanup(os.environ.pop, "CARGO_HOME")
        url = crate.as_uri()
        self.write_crate("project", dependencies='elsewhere = { git = "%s" }' % url)
        # Do not pass --offline, because cargo treats a local git repository as a network source.
        subprocess.run(["cargo", "generate-lockfile", "--quiet"], cwd=self.root, check=True)
        self.assert_refused("elsewhere 0.1.0 comes from git+%s" % url, "project 0.1.0 accepts any version of `elsewhere`; name a version")

    def test_other_registry_is_refused(self):
        package = {"name": "own", "version": "1.0.0", "license": "MIT", "dependencies": [], "source": "registry+https://example.org/index"}
        rules = policy.load_policy(self.root / "deny.toml")
        self.assertEqual(list(policy.refusals_of(package, rules)), ["comes from registry+https://example.org/index, not from crates.io"])
        self.assertEqual(list(policy.refusals_of(dict(package, source=policy.CRATES_IO[0]), rules)), [])

    def test_setting_that_is_not_enforced_is_an_error(self):
        self.depend_on("")
        self.change_policy('wildcards = "deny"', 'wildcards = "warn"')
        self.assert_refused("deny.toml: `bans.wildcards` is 'warn', wanted 'deny'")
        self.change_policy('wildcards = "warn"', 'skip = []')
        self.assert_refused("deny.toml: `bans.skip` is not enforced")
        self.change_policy("skip = []", "")
        self.change_policy("[sources]", "[origins]")
        self.assert_refused("deny.toml: `origins` is not enforced")

    def test_licence_expressions_are_evaluated(self):
        allowed = ["MIT", "Zlib", "Apache-2.0 WITH LLVM-exception"]
        for expression, answer in {
            "MIT": True, "GPL-3.0": False, "GPL-3.0 OR MIT": True, "GPL-3.0/MIT": True, "GPL-3.0 AND MIT": False,
            "MIT AND (GPL-3.0 OR Zlib)": True, "MIT AND GPL-3.0 OR Zlib": True, "(MIT OR Zlib) AND GPL-3.0": False,
            "Apache-2.0 WITH LLVM-exception": True, "Apache-2.0": False, "MIT WITH LLVM-exception": False,
        }.items():
            self.assertEqual(policy.Licence(expression, allowed).is_allowed(), answer, expression)
        for expression in ("", "MIT OR", "(MIT", "MIT MIT", "MIT, Zlib", "WITH"):
            with self.assertRaises(policy.PolicyError, msg=expression):
                policy.Licence(expression, allowed).is_allowed()


if __name__ == "__main__":
    unittest.main()
