"""Tests of the scripts that set up libtorch, GeoCLIP and the Python packages.

The tests run the scripts from the command line, with the real pip and tiny local wheels.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "setup/libtorch.py"
LIBRARIES = ["libtorch_cpu.so", "libtorch_cuda.so", "libtorch.so", "libc10.so", "libgomp.so.1"]
VERSION_HEADER = "#define TORCH_VERSION_MAJOR {}\n#define TORCH_VERSION_MINOR {}\n#define TORCH_VERSION_PATCH {}\n"
FILES = {
    "torch": dict(
        {"torch/lib/" + name: "the library %s\n" % name * 50 for name in LIBRARIES},
        **{"torch/include/torch/headeronly/version.h": VERSION_HEADER.format(2, 11, 0)},
        **{"torch/version.py": "cuda = '13.0'\n", "torch/nn/modules.py": "python code, not wanted\n"},
    ),
    "nvidia-cuda-runtime": {"nvidia/cu13/lib/libcudart.so.13": "cudart\n"},
    "nvidia-nccl-cu13": {"nvidia/nccl/include/nccl.h": "nccl\n"},
    "nvidia-cudnn-cu13": {"nvidia/cudnn/lib/libcudnn.so.9": "cudnn\n"},
}
LOCKS = {"cpu": ["torch", "nvidia-cuda-runtime"], "link": ["nvidia-nccl-cu13"], "cuda": ["nvidia-cudnn-cu13"]}


def make_wheel(folder, name, files, version="2.11.0"):
    """Makes a wheel that pip accepts, with the right name and tags, METADATA, WHEEL and a licence."""
    stem = "%s-%s" % (name.replace("-", "_"), version)
    tags = "cp311-cp311-manylinux_2_28_x86_64" if name == "torch" else "py3-none-manylinux2014_x86_64"
    path = folder / ("%s-%s.whl" % (stem, tags))
    with zipfile.ZipFile(path, "w") as wheel:
        for member, text in files.items():
            wheel.writestr(member, text)
        wheel.writestr(stem + ".dist-info/METADATA", "Metadata-Version: 2.1\nName: %s\nVersion: %s\n" % (name, version))
        wheel.writestr(stem + ".dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: %s\n" % tags)
        wheel.writestr(stem + ".dist-info/RECORD", "")
        wheel.writestr(stem + ".dist-info/licenses/LICENSE", "the licence\n")
    return path


class SetupTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="locdiff-setup-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.root, self.wheels, self.locks = (self.folder / name for name in ("project", "wheels", "locks"))
        for path in (self.root, self.wheels, self.locks):
            path.mkdir()
        self.libtorch = self.root / ".libtorch"
        self.write_locks()

    def write_locks(self, files=FILES, version="2.11.0", unpacked_bytes=1000):
        """Makes the wheels and the lock files that pin them."""
        for set_name, names in LOCKS.items():
            lines = ["# a comment"]
            for name in names:
                wheel = make_wheel(self.wheels, name, files[name], version)
                digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
                lines.append("# bytes: download %d, unpacked %d" % (wheel.stat().st_size, unpacked_bytes))
                lines.append("%s==%s --hash=sha256:%s" % (name, version, digest))
            (self.locks / (set_name + ".lock")).write_text("\n".join(lines) + "\n")

    def command(self, set_name, *options, python=(sys.executable,)):
        return [*python, str(SCRIPT), "--set", set_name, "--root", str(self.root), "--locks", str(self.locks), *options]

    def environment(self, **changes):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        for name in ("LIBTORCH", "LOCDIFF_CUDA"):
            kept.pop(name, None)
        pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)}
        return {**kept, **pip, **changes}

    def run_setup(self, set_name="cpu", *options, python=(sys.executable,), **changes):
        return subprocess.run(
            self.command(set_name, *options, python=python), env=self.environment(**changes), timeout=120,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True,
        )

    def assert_ready(self, result):
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assert_whole()

    def assert_whole(self):
        for name in LOCKS["cpu"]:
            for member, text in FILES[name].items():
                path = self.libtorch / "site" / member
                self.assertEqual(path.exists(), "torch/nn" not in member, member)
                if path.exists():
                    self.assertEqual(path.read_text(), text, member)
        for name in ("libtorch_cpu.so", "libc10.so", "libgomp.so.1"):
            self.assertEqual((self.libtorch / "cpu/lib" / name).resolve(), (self.libtorch / "site/torch/lib" / name).resolve())
            self.assertTrue((self.libtorch / "cpu/lib" / name).exists(), name)
        self.assertEqual((self.libtorch / "cpu/lib/libtorch.so").read_text(), "INPUT(-ltorch_cpu -lc10)\n")
        self.assertFalse((self.libtorch / "cpu/lib/libtorch_cuda.so").exists())
        self.assertTrue((self.libtorch / "cpu/include/torch/headeronly/version.h").exists())
        self.assertTrue((self.libtorch / "cuda/lib/libtorch_cuda.so").exists())
        self.assertEqual(list(self.libtorch.rglob("*.whl")), [], "unpacked wheels were not deleted")

    def assert_refused(self, result, *parts):
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertNotIn("Traceback", result.stderr)
        messages = [line for line in result.stderr.splitlines() if "downloading" not in line]
        self.assertTrue(all(line.startswith("setup: ") for line in messages), result.stderr)
        self.assertLessEqual(len(messages), 2, result.stderr)
        for part in parts:
            self.assertIn(part, result.stderr)

    # --- success

    def test_fresh_setup_creates_the_layout(self):
        self.assert_ready(self.run_setup())
        self.assertTrue((self.libtorch / "site/torch-2.11.0.dist-info/licenses/LICENSE").exists())
        self.assertFalse((self.libtorch / "site/torch-2.11.0.dist-info/METADATA").exists())
        self.assertFalse((self.libtorch / "site/nvidia/nccl").exists(), "the set `cpu` installed NCCL")

    def test_each_set_adds_to_the_previous_one_and_removes_nothing(self):
        nccl, cudnn = (self.libtorch / "site" / path for path in ("nvidia/nccl/include/nccl.h", "nvidia/cudnn/lib/libcudnn.so.9"))
        self.assert_ready(self.run_setup("link"))
        self.assertEqual((nccl.exists(), cudnn.exists()), (True, False))
        self.assert_ready(self.run_setup("cuda"))
        self.assert_ready(self.run_setup("cpu"))
        self.assertEqual((nccl.exists(), cudnn.exists()), (True, True))

    def test_second_run_needs_no_pip_and_changes_nothing(self):
        self.assert_ready(self.run_setup())
        before = {path: path.lstat().st_mtime_ns for path in self.libtorch.rglob("*") if path.is_file()}
        shutil.rmtree(self.wheels)
        # With -S, Python cannot import pip.
        self.assert_ready(self.run_setup(python=(sys.executable, "-S")))
        after = {path: path.lstat().st_mtime_ns for path in self.libtorch.rglob("*") if path.is_file()}
        before.pop(self.libtorch / "lock"), after.pop(self.libtorch / "lock")
        self.assertEqual(before, after)

    def test_auto_follows_locdiff_cuda(self):
        for value, variant in (("0", "cpu"), ("1", "cuda")):
            result = self.run_setup("auto", "--print-variant", LOCDIFF_CUDA=value)
            self.assertEqual((result.returncode, result.stdout), (0, variant + "\n"))
        self.assert_refused(self.run_setup("auto", LOCDIFF_CUDA="yes"), "LOCDIFF_CUDA is `yes`, wanted 0 or 1")
        self.assert_ready(self.run_setup("auto", LOCDIFF_CUDA="0"))
        self.assertFalse((self.libtorch / "site/nvidia/cudnn").exists())

    def test_new_lock_replaces_the_old_version(self):
        old = {**FILES, "torch": {**FILES["torch"], "torch/include/dropped_later.h": "old\n"}}
        self.write_locks(old, version="2.10.0")
        self.assertEqual(self.run_setup().returncode, 0)
        self.assertTrue((self.libtorch / "site/torch/include/dropped_later.h").exists())
        self.write_locks()
        self.assert_ready(self.run_setup())
        self.assertFalse((self.libtorch / "site/torch/include/dropped_later.h").exists())

    def test_concurrent_runs_wait_for_each_other(self):
        runs = [
            subprocess.Popen(self.command("cpu"), env=self.environment(), stderr=subprocess.PIPE, universal_newlines=True)
            for _ in range(2)
        ]
        outputs = [run.communicate(timeout=120)[1] for run in runs]
        self.assertEqual([run.returncode for run in runs], [0, 0], outputs)
        self.assertEqual("".join(outputs).count("downloading torch"), 1, outputs)
        self.assert_whole()

    # --- repair

    def test_deleted_and_truncated_files_are_repaired(self):
        self.assert_ready(self.run_setup())
        site = self.libtorch / "site"
        (site / "torch/lib/libc10.so").unlink()
        os.truncate(site / "nvidia/cu13/lib/libcudart.so.13", 3)
        result = self.run_setup()
        self.assert_ready(result)
        self.assertIn("repairing torch: torch/lib/libc10.so is missing", result.stderr)
        self.assertIn("repairing nvidia-cuda-runtime: nvidia/cu13/lib/libcudart.so.13 has 3 bytes, wanted 7", result.stderr)

    def test_only_the_damaged_wheel_is_downloaded_again(self):
        self.assert_ready(self.run_setup())
        (self.libtorch / "site/nvidia/cu13/lib/libcudart.so.13").unlink()
        for torch in self.wheels.glob("torch-*"):
            torch.unlink()
        self.assert_ready(self.run_setup())

    def test_damaged_marker_and_prefix_are_repaired(self):
        self.assert_ready(self.run_setup())
        (self.libtorch / "installed/torch.json").write_text('{"sha256": "')
        (self.libtorch / "cpu/lib/libc10.so").unlink()
        (self.libtorch / "cpu/lib/libtorch.so").write_text("")
        (self.libtorch / "cuda/lib").unlink()
        self.assert_ready(self.run_setup())

    def test_run_killed_while_unpacking_is_repaired(self):
        many = {"torch/include/part_%d.h" % number: "text\n" * 2000 for number in range(3000)}
        self.write_locks({**FILES, "torch": {**FILES["torch"], **many}})
        run = subprocess.Popen(self.command("cpu"), env=self.environment(), stderr=subprocess.DEVNULL)
        unpacked = self.libtorch / "unpack/torch/include/part_100.h"
        while not unpacked.exists():
            self.assertIsNone(run.poll(), "the run ended before it could be killed")
        run.send_signal(signal.SIGKILL)
        run.wait()
        self.assertFalse((self.libtorch / "installed/torch.json").exists(), "the marker exists before all files are in place")
        # The download was complete before the run was killed, so the wheel is not downloaded again.
        for torch in self.wheels.glob("torch-*"):
            torch.unlink()
        self.assert_ready(self.run_setup())
        self.assertEqual(len(list((self.libtorch / "site/torch/include").glob("part_*.h"))), 3000)
        self.assertFalse((self.libtorch / "unpack").exists())

    def test_incomplete_download_is_downloaded_again(self):
        wheel = next(self.wheels.glob("torch-*"))
        (self.libtorch / "download").mkdir(parents=True)
        (self.libtorch / "download" / wheel.name).write_bytes(wheel.read_bytes()[:100])
        self.assert_ready(self.run_setup())

    # --- errors

    def test_hash_mismatch_is_refused(self):
        wanted = hashlib.sha256(next(self.wheels.glob("torch-*")).read_bytes()).hexdigest()
        changed = make_wheel(self.wheels, "torch", {"torch/lib/libtorch_cpu.so": "something else\n"})
        got = hashlib.sha256(changed.read_bytes()).hexdigest()
        self.assert_refused(self.run_setup(), "torch 2.11.0: sha256 is %s, cpu.lock wants %s" % (got, wanted))
        self.assertFalse((self.libtorch / "site").exists())

    def test_network_error_includes_the_message_of_pip(self):
        closed = "http://127.0.0.1:9/simple"
        result = self.run_setup(PIP_NO_INDEX="0", PIP_FIND_LINKS="", PIP_INDEX_URL=closed, PIP_RETRIES="0")
        self.assert_refused(result, "cannot download torch 2.11.0: pip says: ", "check the network")
        self.assertIn("No matching distribution found for torch==2.11.0", result.stderr)
        self.assert_ready(self.run_setup())

    def test_missing_pip_error_says_what_to_install(self):
        # The option -S hides site-packages, which contains pip.
        self.assert_refused(self.run_setup(python=(sys.executable, "-S")), "has no pip", "python3-pip", "ensurepip")

    def test_too_little_space_is_reported_before_the_download(self):
        self.write_locks(unpacked_bytes=10**18)
        result = self.run_setup()
        self.assert_refused(result, "free, wanted ", "for torch, nvidia-cuda-runtime", "free some space")
        self.assertNotIn("downloading", result.stderr)

    def test_lock_entry_without_size_is_refused(self):
        lock = self.locks / "link.lock"
        lock.write_text(lock.read_text().replace("# bytes", "# octets"))
        self.assert_refused(self.run_setup(), "link.lock", "`# bytes:`")

    def test_unsupported_platform_error_suggests_libtorch(self):
        shim = "import platform, runpy, sys; platform.machine = lambda: 'aarch64'; sys.argv = sys.argv[1:]; "
        shim += "sys.path.insert(0, sys.argv[0].rpartition('/')[0]); runpy.run_path(sys.argv[0], run_name='__main__')"
        result = self.run_setup(python=(sys.executable, "-c", shim))
        self.assert_refused(result, "Linux aarch64", "install libtorch 2.11.0 by hand and set LIBTORCH to its folder")

    # --- the user's own LIBTORCH

    def make_own_libtorch(self, version=(2, 11, 0), libraries=("libtorch_cpu.so",)):
        own = self.folder / "own"
        header = own / "include/torch/headeronly/version.h"
        header.parent.mkdir(parents=True)
        header.write_text(VERSION_HEADER.format(*version))
        (own / "lib").mkdir()
        for name in libraries:
            (own / "lib" / name).touch()
        return str(own)

    def test_own_libtorch_is_used_without_download(self):
        own = self.make_own_libtorch()
        result = self.run_setup(LIBTORCH=own, PIP_FIND_LINKS="/nonexistent")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("using LIBTORCH=%s (2.11.0, cpu)" % own, result.stderr)
        self.assertFalse(self.libtorch.exists())

    def test_own_libtorch_determines_the_variant(self):
        own = self.make_own_libtorch(libraries=("libtorch_cpu.so", "libtorch_cuda.so"))
        self.assertEqual(self.run_setup("auto", "--print-variant", LIBTORCH=own).stdout, "cuda\n")
        self.assert_refused(self.run_setup(LIBTORCH=own, LOCDIFF_CUDA="0"), "LOCDIFF_CUDA=0, but LIBTORCH=%s is a CUDA libtorch" % own)

    def test_own_libtorch_of_another_version_is_refused(self):
        own = self.make_own_libtorch(version=(2, 9, 1))
        self.assert_refused(self.run_setup(LIBTORCH=own), "LIBTORCH=%s is libtorch 2.9.1, wanted 2.11.0" % own)

    def test_unreadable_own_libtorch_is_refused(self):
        self.assert_refused(self.run_setup(LIBTORCH="/nonexistent"), "LIBTORCH=/nonexistent: cannot read", "version.h", "point LIBTORCH at a libtorch 2.11.0")

    def test_own_libtorch_without_libtorch_cpu_is_refused(self):
        self.assert_refused(self.run_setup(LIBTORCH=self.make_own_libtorch(libraries=())), "has no lib/libtorch_cpu.so")

    def test_libtorch_pointing_at_the_downloaded_one_is_prepared(self):
        self.assert_ready(self.run_setup("auto", LIBTORCH=str(self.libtorch / "cpu")))


class GeoclipTest(unittest.TestCase):
    """GeoCLIP's wheel is downloaded once, and every run checks it. A damaged wheel is downloaded again."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="locdiff-geoclip-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        with zipfile.ZipFile(self.folder / "geoclip-1.3.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("geoclip/model/weights/weights.pth", "weights\n" * 1000)
            wheel.writestr("geoclip-1.3.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: geoclip\nVersion: 1.3.0\n")
            wheel.writestr("geoclip-1.3.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr("geoclip-1.3.0.dist-info/RECORD", "")
        self.source = self.folder / "geoclip-1.3.0-py3-none-any.whl"
        self.bytes = self.source.read_bytes()
        (self.folder / "geoclip.lock").write_text("# bytes: download %d, unpacked 0\ngeoclip==1.3.0 --hash=sha256:%s\n" % (
            len(self.bytes), hashlib.sha256(self.bytes).hexdigest()))
        self.target = self.folder / "project/.geoclip" / self.source.name
        self.target.parent.mkdir(parents=True)

    def run_setup(self, **changes):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        environment.update(PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(self.folder), **changes)
        command = [sys.executable, str(SCRIPT.with_name("geoclip.py")), "--root", str(self.folder / "project"), "--locks", str(self.folder)]
        return subprocess.run(command, env=environment, timeout=120, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)

    def test_wheel_is_downloaded_once_repaired_and_checked(self):
        # An earlier run left an incomplete download.
        (self.target.parent / "download").mkdir()
        (self.target.parent / "download" / self.source.name).write_bytes(self.bytes[:100])
        for damage in (None, b"", self.bytes[:-1], b"X" + self.bytes[1:]):
            if damage is not None:
                self.target.write_bytes(damage)
            result = self.run_setup()
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(self.target.read_bytes(), self.bytes)
            self.assertEqual("repairing" in result.stderr, damage is not None, result.stderr)
        self.source.write_bytes(self.bytes[:-1] + b"X")
        result = self.run_setup()
        self.assertEqual((result.returncode, result.stderr), (0, ""), "pip ran although the wheel is intact")
        self.target.unlink()
        result = self.run_setup()
        self.assertEqual(result.returncode, 1)
        self.assertIn("geoclip.lock wants", result.stderr)
        self.source.unlink()
        result = self.run_setup()
        self.assertEqual(result.returncode, 1)
        self.assertIn("cannot download geoclip 1.3.0: pip says: ", result.stderr)
        self.assertIn("check the network", result.stderr)
        self.assertNotIn("Traceback", result.stderr)
        self.assertFalse(self.target.exists())


class PythonToolsTest(unittest.TestCase):
    """The Python packages for the tests are installed once, and again if the lock file or an installed file has changed."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="locdiff-python-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.tools = self.folder / "project/.tools"
        self.python = self.tools / "python"
        self.tools.mkdir(parents=True)
        self.write_lock("1.0")

    def write_lock(self, version):
        """Makes a package with one module, and the lock that pins it."""
        self.wheel = self.folder / ("numbers_for_tests-%s-py3-none-any.whl" % version)
        information = "numbers_for_tests-%s.dist-info/" % version
        with zipfile.ZipFile(self.wheel, "w") as wheel:
            wheel.writestr("numbers_for_tests.py", "VERSION = '%s'\n" % version)
            wheel.writestr(information + "METADATA", "Metadata-Version: 2.1\nName: numbers-for-tests\nVersion: %s\n" % version)
            wheel.writestr(information + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(information + "RECORD", "")
        digest = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        (self.folder / "python.lock").write_text("numbers-for-tests==%s \\\n    --hash=sha256:%s\n" % (version, digest))

    def run_setup(self):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        environment.update(PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(self.folder))
        command = [sys.executable, str(SCRIPT.with_name("python_tools.py")), "--root", str(self.folder / "project"), "--locks", str(self.folder)]
        return subprocess.run(command, env=environment, timeout=120, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)

    def assert_installed(self, version, *messages):
        result = self.run_setup()
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual((self.python / "numbers_for_tests.py").read_text(), "VERSION = '%s'\n" % version)
        self.assertTrue((self.python / "installed.json").exists())
        self.assertEqual(sorted(path.name for path in self.tools.iterdir()), ["lock", "python"], "temporary files were left behind")
        for message in messages:
            self.assertIn(message, result.stderr)
        if not messages:
            self.assertEqual(result.stderr, "")

    def test_packages_are_installed_once_and_repaired(self):
        # An earlier run was killed during the installation.
        (self.tools / "python.new").mkdir()
        (self.tools / "python.new/numbers_for_tests.py").write_text("VERS")
        self.assert_installed("1.0", "ready in")
        self.assert_installed("1.0")
        (self.python / "numbers_for_tests.py").write_text("VERS")
        self.assert_installed("1.0", "numbers_for_tests.py is missing or has the wrong size")
        (self.python / "installed.json").write_text("[]")
        self.assert_installed("1.0", "installed.json is damaged")
        (self.python / "installed.json").unlink()
        self.assert_installed("1.0", "ready in")

    def test_new_lock_replaces_the_old_version(self):
        self.assert_installed("1.0", "ready in")
        self.write_lock("1.1")
        self.assert_installed("1.1", "another lock file or Python version")
        self.assertEqual(list(self.python.glob("*1.0*")), [])

    def test_package_that_is_not_in_the_lock_is_refused(self):
        self.wheel.write_bytes(self.wheel.read_bytes() + b"X")
        result = self.run_setup()
        self.assertEqual(result.returncode, 1)
        self.assertIn("is not in python.lock", result.stderr)
        self.assertFalse(self.python.exists())
        self.wheel.unlink()
        result = self.run_setup()
        self.assertEqual(result.returncode, 1)
        self.assertIn("setup: pip finds no numbers-for-tests==1.0", result.stderr)
        self.assertNotIn("Traceback", result.stderr)


if __name__ == "__main__":
    unittest.main()
