"""A real sshd on hosts of `tests.network`, and keys for it.

    with SshHosts(["host0", "host1"]) as hosts:
        hosts.popen("mgpu-tf", "launch", "--hosts=host0,host1", "--ssh", ...)

It needs root, iproute2 and Debian's openssh-server; `make slurm` installs them.
"""

import contextlib
import pathlib
import shutil
import subprocess
import tempfile
import time

from tests import clusters
from tests.network import Network, check_programs

PROGRAMS = ("sshd", "ssh", "ssh-keygen")
DRIVER = "driver"

_CONFIG = """Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
SetEnv PYTHONPATH={path}
"""


class SshHosts:
    """Hosts with an sshd each, and one without that runs the launcher.

    Args:
        names: The names of the hosts.
    """

    def __init__(self, names):
        check_programs(PROGRAMS, "openssh-server and openssh-client")
        self.names = list(names)
        self.network = Network([DRIVER, *self.names])
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="ssh-"))
        self._daemons = []

    def __enter__(self):
        try:
            self.network.__enter__()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for daemon in self._daemons:
            daemon.terminate()
            daemon.wait()
        self.network.__exit__()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def ssh_command(self):
        """The program, with the key of these hosts."""
        return (
            f"ssh -F none -i {self._folder}/user_key -o LogLevel=ERROR "
            "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
        )

    def popen(self, *command, **options):
        """Starts a command on the host of the launcher."""
        usual = {
            "env": clusters.environment(),
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }
        return self.network.popen(DRIVER, command, **(usual | options))

    def _start(self):
        # sshd takes a key of root only where no other can write.
        self._folder.chmod(0o755)
        for name in ("host_key", "user_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", ""]
                + ["-f", str(self._folder / name)],
                check=True,
            )
        config = self._folder / "sshd_config"
        config.write_text(
            _CONFIG.format(folder=self._folder, path=clusters.PATH)
        )
        # Where Debian's sshd gives up its rights; made at boot elsewhere.
        pathlib.Path("/run/sshd").mkdir(exist_ok=True)
        sshd = shutil.which("sshd")
        for name in self.names:
            self._daemons.append(
                self.network.popen(
                    name,
                    [sshd, "-D", "-e", "-f", str(config)],
                    stderr=subprocess.DEVNULL,
                )
            )
        for name in self.names:
            self._await(name)

    def _await(self, name):
        deadline = time.monotonic() + 60
        words = self.ssh_command.split()
        while True:
            tried = self.popen(*words, name, "true")
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, _ = tried.communicate(timeout=30)
                if tried.returncode == 0:
                    return
            tried.kill()
            assert time.monotonic() < deadline, (name, output)
            time.sleep(0.2)
