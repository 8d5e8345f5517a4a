"""A worker of the compile pool that answers without compiling; ``worker_echo`` starts it."""

import pickle
import sys
import time


def main():
    pickle.dump("ready", sys.stdout.buffer)
    sys.stdout.buffer.flush()
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        if job.template == "dies":
            sys.exit("it was too much")
        if job.template == "slow":
            time.sleep(0.5)
        if job.template == "stuck":
            time.sleep(60)
        known = job.template in ("fits", "slow")
        pickle.dump("" if known else f"no template {job.template}", sys.stdout.buffer)
        sys.stdout.buffer.flush()
