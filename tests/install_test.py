"""Tests of setup/install.py, which `make install` and `make uninstall` run. The binaries and libraries are fakes."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
SCRIPT = PROJECT / "setup/install.py"
LIST = "share/locdiff-launch/installed.txt"


class InstallTest(unittest.TestCase):
    LAUNCHER = "#!/bin/sh\necho \"$1 for $2\"\n"
    # The loader cannot find the libraries of the fake worker, so the tests replace `elf.resolve` with a fixed answer.
    SHIM = "import runpy, sys; sys.path.insert(0, sys.argv[1].rpartition('/')[0]); import elf; lib = sys.argv[2]; "
    SHIM += "elf.resolve = lambda path: [(name, lib + '/' + name) for name in ('libtorch_cpu.so', 'libc10.so')]; "
    SHIM += "sys.argv = [sys.argv[1], *sys.argv[3:]]; runpy.run_path(sys.argv[0], run_name='__main__')"

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="locdiff-install-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.site, self.binaries, self.stage = (self.folder / name for name in ("site", "release", "stage"))
        self.root = self.stage / "opt/locdiff"
        licence = "torch-2.11.0.dist-info/licenses/LICENSE"
        for name in ("torch/lib/libtorch_cpu.so", "torch/lib/libc10.so", licence, "numpy-2.0.dist-info/LICENSE"):
            (self.site / name).parent.mkdir(parents=True, exist_ok=True)
            (self.site / name).write_text(name)
        self.binaries.mkdir()
        for name in ("locdiff-launch", "locdiff-worker"):
            (self.binaries / name).write_text(self.LAUNCHER)
            (self.binaries / name).chmod(0o755)

    def run_script(self, *options):
        command = [sys.executable, "-B", "-c", self.SHIM, str(SCRIPT), str(self.site / "torch/lib")]
        return subprocess.run(
            [*command, *options, "--prefix", "/opt/locdiff", "--destdir", str(self.stage)], timeout=60,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True,
        )

    def install(self):
        result = self.run_script("--binaries", str(self.binaries))
        self.assertEqual((result.returncode, result.stderr), (0, ""))

    def uninstall(self):
        result = self.run_script("--uninstall")
        self.assertEqual((result.returncode, result.stderr), (0, ""))

    def files(self):
        return sorted(path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if path.is_file())

    def test_installation_has_programs_libraries_completions_documents_and_licences(self):
        self.install()
        documents = ["CHANGELOG.md", "LICENSE-APACHE", "LICENSE-MIT", "OPERATIONS.md", "README.md", "configs/README.md"]
        self.assertEqual(self.files(), [
            "bin/locdiff-launch", "bin/locdiff-worker", "lib/locdiff/torch/lib/libc10.so",
            "lib/locdiff/torch/lib/libtorch_cpu.so", "share/bash-completion/completions/locdiff-launch",
            *("share/doc/locdiff-launch/" + name for name in documents),
            "share/doc/locdiff-launch/licences/torch-2.11.0/LICENSE",
            "share/fish/vendor_completions.d/locdiff-launch.fish", LIST,
            "share/zsh/site-functions/_locdiff-launch",
        ])
        share = self.root / "share"
        self.assertEqual((share / "zsh/site-functions/_locdiff-launch").read_text(), "completions for zsh\n")
        operations = PROJECT / "docs/OPERATIONS.md"
        self.assertEqual((share / "doc/locdiff-launch/OPERATIONS.md").read_text(), operations.read_text())
        self.assertTrue(os.access(self.root / "bin/locdiff-launch", os.X_OK))
        listed = (self.root / LIST).read_text().splitlines()
        self.assertEqual([name for name in listed if not name.endswith("/")], self.files())

    def test_uninstall_removes_what_was_installed_and_nothing_else(self):
        own = [self.root / name for name in ("bin/own", "lib/own/kept", "share/doc/locdiff-launch/notes")]
        for path in own[:2]:
            path.parent.mkdir(parents=True)
            path.touch()
        (self.root / "share/zsh").mkdir(parents=True)  # It was empty before, so it stays.
        self.install()
        own[2].touch()
        (self.root / "bin/locdiff-launch").write_text("changed")
        (self.root / "bin/locdiff-worker").unlink()
        self.uninstall()
        self.assertEqual(self.files(), sorted(path.relative_to(self.root).as_posix() for path in own))
        folders = sorted(path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if path.is_dir())
        self.assertEqual(folders, ["bin", "lib", "lib/own", "share", "share/doc", "share/doc/locdiff-launch", "share/zsh"])

    def test_second_installation_changes_nothing_or_replaces_the_first(self):
        self.install()
        names, listed = self.files(), (self.root / LIST).read_text()
        self.install()
        self.assertEqual((self.files(), (self.root / LIST).read_text()), (names, listed))
        (self.site / "torch-2.11.0.dist-info").rename(self.site / "torch-2.12.0.dist-info")
        self.install()
        old, new = (Path("share/doc/locdiff-launch/licences/torch-" + version) for version in ("2.11.0", "2.12.0"))
        self.assertEqual(((self.root / old).exists(), (self.root / new).exists()), (False, True))
        self.uninstall()
        self.assertFalse(self.root.exists(), "a folder that the installation created was left behind")

    def test_interrupted_installation_can_be_removed(self):
        (self.root / "share/fish").mkdir(parents=True)
        (self.root / "share/fish/vendor_completions.d").touch()  # A file where a folder is wanted.
        result = self.run_script("--binaries", str(self.binaries))
        self.assertEqual(result.returncode, 1)
        self.assertIn("install: ", result.stderr)
        self.assertNotIn("Traceback", result.stderr)
        self.uninstall()
        self.assertEqual(self.files(), ["share/fish/vendor_completions.d"])

    def test_uninstall_refuses_a_prefix_without_installation_and_a_damaged_list(self):
        result = self.run_script("--uninstall")
        self.assertEqual(result.returncode, 1)
        self.assertIn("uninstall: %s/%s: no such list" % (self.root, LIST), result.stderr)
        self.assertIn("give the PREFIX and DESTDIR of `make install`", result.stderr)
        command = ["make", "-C", str(PROJECT), "uninstall", "PREFIX=/opt/locdiff", "DESTDIR=%s" % self.stage, "PYTHON=" + sys.executable]
        environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
        made = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, universal_newlines=True)
        self.assertNotEqual(made.returncode, 0)
        self.assertIn(result.stderr, made.stderr)
        self.install()
        with open(self.root / LIST, "a") as listed:
            listed.write("../../../site/torch/lib/libc10.so\n")
        result = self.run_script("--uninstall")
        self.assertEqual(result.returncode, 1)
        self.assertIn("is not below the prefix", result.stderr)
        self.assertTrue((self.site / "torch/lib/libc10.so").exists() and (self.root / "bin/locdiff-launch").exists())

    def test_failing_launcher_installs_nothing(self):
        (self.binaries / "locdiff-launch").write_text("#!/bin/sh\nexit 3\n")
        result = self.run_script("--binaries", str(self.binaries))
        self.assertEqual(result.returncode, 1)
        self.assertIn("locdiff-launch completions bash` exited with 3", result.stderr)
        self.assertFalse(self.root.exists())


if __name__ == "__main__":
    unittest.main()
