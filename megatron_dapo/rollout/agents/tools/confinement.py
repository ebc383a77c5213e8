"""What a tool's process may not do. The kernel enforces it, and the process cannot undo it.

- No processes, no signals to others, no debugging, no mounts, no shared memory: a seccomp filter refuses the system
  calls. So a fork bomb fails at its first fork, and killing one process ends everything that a call has started.
- No network unless it is allowed: no socket can be created, or only internet sockets. Local daemons have Unix sockets,
  which are never allowed.
- Its scratch directory is a file system of its own, in memory and of limited size, in a user and a mount namespace.
  Where namespaces are refused, as in most containers, the directory is an ordinary one that `tool_worker` watches.
- Files: Landlock lets it write below its scratch directory only, and read the system and Python, not data or home
  directories. Where the kernel has no Landlock, it can write nothing at all and read what the user can; if that
  includes the environment of other processes, nothing is run.
- CPU time, memory, file size and descriptors are limited by resource limits; it has no capabilities. What else could
  take memory of the kernel is refused, or watched by `tool_worker`.

Imported by `tool_worker`, which runs without this package: standard library only. Linux on x86_64 and aarch64.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import struct
import sys

_LIBC = ctypes.CDLL(None, use_errno=True)

# Number on x86_64 and on aarch64; None: the system call does not exist there.
FORBIDDEN: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "io_uring_setup": (425, 425), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "bpf": (321, 280), "perf_event_open": (298, 241),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142), "kexec_load": (246, 104),
    "swapon": (167, 224), "swapoff": (168, 225), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "sethostname": (170, 161), "memfd_create": (319, 279), "userfaultfd": (323, 282), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "setpriority": (141, 140),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "ioprio_set": (251, 30), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "shmat": (30, 196), "shmctl": (31, 195), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "semop": (65, 193), "semtimedop": (220, 192), "semctl": (66, 191), "mq_unlink": (241, 181),
    "sync": (162, 81), "syncfs": (306, 267), "memfd_secret": (447, 447), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fspick": (433, 433), "mount_setattr": (442, 442), "quotactl": (179, 60), "sched_setparam": (142, 118),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "move_pages": (279, 239),
    "migrate_pages": (256, 238), "kcmp": (312, 272),
    # Memory of the kernel that no limit of a process counts: pages in pipes (of a huge page one byte), watches, rules.
    "vmsplice": (278, 75), "splice": (275, 76), "tee": (276, 77), "inotify_init": (253, None),
    "inotify_init1": (294, 26), "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
}  # fmt: skip
_FIRST_UNKNOWN = 451  # from Linux 6.5 on; newer system calls do what older ones are refused, such as setxattrat
# A datagram socket of a pair could be connected to another address; sendmsg could hide open files in flight.
NETWORK: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
}  # fmt: skip
# Without Landlock: everything that changes a directory or a file by its name.
WRITING: dict[str, tuple[int | None, int | None]] = {
    "creat": (85, None), "openat2": (437, 437), "truncate": (76, 45), "mkdir": (83, None), "mkdirat": (258, 34),
    "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38),
    "renameat2": (316, 276), "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
    "mknod": (133, None), "mknodat": (259, 33),
}  # fmt: skip
_CLONE, _CLONE3, _OPEN, _OPENAT, _PRLIMIT = (56, 220), (435, 435), (2, None), (257, 56), (302, 261)
_SOCKET, _SOCKETPAIR, _SENDTO, _FCNTL, _IOCTL = NETWORK["socket"], (53, 199), (44, 206), (72, 25), (16, 29)
_DATAGRAM, _INTERNET = 2, (2, 10)  # a bit of a socket's type, and the families AF_INET and AF_INET6
# F_SETOWN, F_SETSIG, F_SETOWN_EX: the kernel would send signals to any process of the user. F_SETPIPE_SZ: its memory.
_FCNTL_REFUSED = (8, 10, 15, 1031)
_SET_OWNER_IOCTL = (0x8901, 0x8902, 0x5412, 0x541C)  # the same as ioctl, and typing into a terminal
_CLONE_THREAD = 0x10000
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000  # a second set of numbers on x86_64

# Classic BPF: load a word of seccomp_data, compare, return.
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in seccomp_data
_DENY, _ABSENT = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand
_DENY_OR_ALLOW: list[Instruction] = [(_RETURN, 0, 0, _DENY), (_RETURN, 0, 0, _ALLOW)]


class CannotConfine(OSError):
    """This machine cannot run tools safely; the message says what is missing."""


def confine(scratch: str, readable: list[str], network: bool) -> None:
    """Applies to this thread for good, so the caller has only one. `readable`: directories besides `scratch`."""
    if _LIBC.prctl(38, 1, 0, 0, 0) != 0:  # PR_SET_NO_NEW_PRIVS: both filters need it
        raise CannotConfine(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS) failed")
    landlocked = _landlock(scratch, readable)
    _drop_capabilities()
    _install(filter_program(network=network, writing=landlocked))
    if _is_readable(f"/proc/{os.getppid()}/environ"):
        raise CannotConfine(0, "tools could read the keys of other processes: no Landlock and no user namespace")


def _is_readable(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError:
        return False
    return True


def limit(cpu_seconds: int, memory_bytes: int, file_bytes: int, files: int) -> None:
    """`memory_bytes`: more than the process has now. `files`: open at a time."""
    with open("/proc/self/statm") as file:
        present = int(file.read().split()[0]) * resource.getpagesize()
    wanted = {
        resource.RLIMIT_CPU: cpu_seconds, resource.RLIMIT_AS: present + memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes, resource.RLIMIT_NOFILE: files, resource.RLIMIT_CORE: 0,
    }  # fmt: skip
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # A second more until the kernel kills it: the first signal tells which limit it was.
        resource.setrlimit(kind, (value, value + 1 if kind == resource.RLIMIT_CPU and hard != value else value))


def filter_program(network: bool, writing: bool, machine: str = "") -> list[Instruction]:
    """The seccomp filter. Each refused call gets EPERM, so that a tool sees PermissionError."""
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise CannotConfine(0, f"tools run on {', '.join(_ARCHITECTURES)}; this machine is {machine}")
    column, architecture = _ARCHITECTURES[machine]
    refused = FORBIDDEN | ({} if network else NETWORK) | ({} if writing else WRITING)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER),
    ]  # fmt: skip
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for numbers in refused.values():
        program += _unless(numbers[column], [(_RETURN, 0, 0, _DENY)])
    program += [(_AT_LEAST, 0, 1, _FIRST_UNKNOWN), (_RETURN, 0, 0, _ABSENT)]
    # glibc falls back to clone, whose flags can be read here.
    program += _unless(_CLONE3[column], [(_RETURN, 0, 0, _ABSENT)])
    program += _unless(_CLONE[column], [(_LOAD, 0, 0, _argument(0)), (_ANY_BIT, 1, 0, _CLONE_THREAD), *_DENY_OR_ALLOW])
    program += _unless(_SOCKETPAIR[column], [(_LOAD, 0, 0, _argument(1)), (_ANY_BIT, 0, 1, _DATAGRAM), *_DENY_OR_ALLOW])
    if network:
        families = [(_EQUAL, 1 + more, 0, family) for more, family in ((1, _INTERNET[0]), (0, _INTERNET[1]))]
        program += _unless(_SOCKET[column], [(_LOAD, 0, 0, _argument(0)), *families, *_DENY_OR_ALLOW])
    else:
        halves = [(_LOAD, 0, 0, _argument(4)), (_EQUAL, 0, 2, 0), (_LOAD, 0, 0, _argument(4) + 4), (_EQUAL, 1, 0, 0)]
        program += _unless(_SENDTO[column], [*halves, *_DENY_OR_ALLOW])
    for numbers, commands in ((_FCNTL, _FCNTL_REFUSED), (_IOCTL, _SET_OWNER_IOCTL)):
        refusals = [step for command in commands for step in ((_EQUAL, 0, 1, command), (_RETURN, 0, 0, _DENY))]
        program += _unless(numbers[column], [(_LOAD, 0, 0, _argument(1)), *refusals, (_RETURN, 0, 0, _ALLOW)])
    # Limits of other processes. Its own cannot be raised.
    program += _unless(_PRLIMIT[column], [(_LOAD, 0, 0, _argument(0)), (_EQUAL, 1, 0, 0), *_DENY_OR_ALLOW])
    if not writing:
        for numbers, flags in ((_OPEN, 1), (_OPENAT, 2)):
            check = [(_LOAD, 0, 0, _argument(flags)), (_ANY_BIT, 0, 1, _WRITE_FLAGS), *_DENY_OR_ALLOW]
            program += _unless(numbers[column], check)
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _argument(index: int) -> int:
    """The offset of its lower half; both machines are little-endian."""
    return _ARGUMENTS + 8 * index


def _unless(number: int | None, then: list[Instruction]) -> list[Instruction]:
    return [] if number is None else [(_EQUAL, 0, len(then), number), *then]


def _install(program: list[Instruction]) -> None:
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    if _LIBC.prctl(22, 2, ctypes.create_string_buffer(header, len(header)), 0, 0) != 0:  # PR_SET_SECCOMP, a filter
        raise CannotConfine(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def _drop_capabilities() -> None:
    """Of root: limits could be raised with them. Its user id stays; Landlock keeps it away from root's files."""
    header = struct.pack("Ii", 0x20080522, 0)
    _LIBC.capset(header, struct.pack("6I", *[0] * 6))


# ---- namespaces ----

_NEW_USER, _NEW_MOUNTS, _NEW_IPC = 0x10000000, 0x20000, 0x8000000
_PRIVATE_RECURSIVE, _NO_SETUID_DEVICES_PROGRAMS = 0x44000, 2 | 4 | 8
INODES = 4096


def private_scratch(folder: str, size: int) -> str:
    """Mounts a file system of `size` bytes at `folder` that only this process sees, and that ends with it. Returns why
    not, if namespaces are refused; empty: done."""
    user, group = os.getuid(), os.getgid()
    if _LIBC.unshare(_NEW_USER | _NEW_MOUNTS | _NEW_IPC) == 0:
        with contextlib.suppress(OSError):
            for name, text in (
                ("uid_map", f"{user} {user} 1"),
                ("setgroups", "deny"),
                ("gid_map", f"{group} {group} 1"),
            ):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
    elif _LIBC.unshare(_NEW_MOUNTS | _NEW_IPC) != 0:  # root may without a user namespace
        return f"namespaces: {os.strerror(ctypes.get_errno())}"
    options = f"size={size},nr_inodes={INODES},mode=0700".encode()
    if (
        _LIBC.mount(b"none", b"/", None, _PRIVATE_RECURSIVE, None) != 0
        or _LIBC.mount(b"tmpfs", folder.encode(), b"tmpfs", _NO_SETUID_DEVICES_PROGRAMS, options) != 0
    ):
        return f"mount: {os.strerror(ctypes.get_errno())}"
    return ""


# ---- Landlock ----

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, read a directory


def landlock_version() -> int:
    """0: this kernel has none."""
    return max(0, int(_LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)))


def _landlock(scratch: str, readable: list[str]) -> bool:
    version = landlock_version()
    if not version:
        return False
    handled = (1 << (13 if version == 1 else 14 if version == 2 else 15 if version < 5 else 16)) - 1
    known = 24 if version >= 6 else 16 if version >= 4 else 8  # bytes of the structure; the last word: signals, sockets
    attributes = struct.pack("QQQ", handled, 0, 3)[:known]
    ruleset = _LIBC.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return False
    try:
        for path in readable:
            _allow(ruleset, path, _READ)
        for path in ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"):
            _allow(ruleset, path, (1 << 2) | (1 << 1))
        _allow(ruleset, scratch, handled & ~(1 << 0))
        if _LIBC.syscall(_RESTRICT_SELF, ruleset, 0) != 0:
            raise CannotConfine(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(ruleset)
    return True


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # it does not exist here
        return
    try:
        if not os.path.isdir(path):
            access &= 0b111  # what applies to a file
        rule = struct.pack("=Qi", access, descriptor)
        if _LIBC.syscall(_ADD_RULE, ruleset, 1, rule, 0) != 0:
            raise CannotConfine(ctypes.get_errno(), f"Landlock, {path}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)


def system_directories(network: bool) -> list[str]:
    """What Python needs to run and to import, and to find hosts."""
    own = [sys.prefix, sys.base_prefix, sys.exec_prefix, *(path for path in sys.path if path.endswith("-packages"))]
    system = ["/usr", "/lib", "/lib64", "/bin", "/etc/localtime", "/etc/ssl", "/proc/self", "/proc/cpuinfo"]
    names = ["/etc/hosts", "/etc/resolv.conf", "/etc/nsswitch.conf"] if network else []
    return sorted({os.path.realpath(path) for path in (*own, *system, *names) if path})
