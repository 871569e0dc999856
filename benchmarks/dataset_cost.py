"""What encoding a million clips costs, from the compiler's estimate, into docs/datasets.md.

    python benchmarks/plan.py v6e-1-encode torchax
    PYTHONPATH=. python benchmarks/dataset_cost.py --price 2.70

Nothing of it was measured: the seconds are the plan's, the price of a chip's hour is the one given.
"""

import argparse
import json
from pathlib import Path

from cogvideox_torchax.files import reports

PAGE = Path("docs/datasets.md")
PLAN = Path("benchmarks/results/plan-v6e-1-encode-torchax.json")
CLIPS = 1_000_000
BYTES_A_VALUE = 4
THROUGHPUT = Path("benchmarks/results/dataset_throughput.json")


def latent_bytes(frames: int, height: int, width: int) -> int:
    """Of a clip's mean and log-variance in float32."""
    return 2 * 16 * ((frames - 1) // 4 + 1) * (height // 8) * (width // 8) * BYTES_A_VALUE


def drawn(plan: dict, ratio: float, price: float) -> str:
    job = plan["job"]
    seconds = plan["summary"]["whole_video_s"]
    hours = CLIPS * seconds / ratio / 3600
    stored = CLIPS * latent_bytes(job["frames"], job["height"], job["width"]) / 1e12
    rows = [
        ("a clip on one chip, by the plan", f"{seconds:.3f} s"),
        ("share of that speed which the batch reaches here", f"{ratio:.2f}"),
        ("a million clips", f"{hours:,.0f} chip hours"),
        ("on 8 chips", f"{hours / 8:,.0f} hours"),
        ("on 256 chips", f"{hours / 256:,.1f} hours"),
        (f"at {price:.2f} dollars for a chip's hour", f"{hours * price:,.0f} dollars"),
        ("mean and log-variance in float32", f"{stored:.1f} TB"),
    ]
    video = f"{job['frames']} x {job['height']} x {job['width']}"
    return reports.table(
        (f"{CLIPS:,} clips of {video}, {plan['topology']}, {plan['dtype']}", "estimate"), rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", type=Path, default=PLAN)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument(
        "--price", type=float, default=2.70, help="of a chip's hour, in dollars (default: 2.70)"
    )
    args = parser.parse_args()
    ratio = min(json.loads(THROUGHPUT.read_text())["ratio"], 1.0)
    reports.fill(args.page, "cost", drawn(json.loads(args.plan.read_text()), ratio, args.price))


if __name__ == "__main__":
    main()
