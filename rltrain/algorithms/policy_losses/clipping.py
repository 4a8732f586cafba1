"""What losses that clip the ratio share."""


def check_clip_ratios(clip_ratio_low: float, clip_ratio_high: float) -> None:
    """Raise ValueError for a range of ratios [1 - low, 1 + high] that leaves out 1."""
    for name, value in (("clip_ratio_low", clip_ratio_low), ("clip_ratio_high", clip_ratio_high)):
        if not value >= 0:
            raise ValueError(f"{name}={value} must be >= 0, or the range leaves out r = 1; use 0.2, say")
