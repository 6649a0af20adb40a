"""vLLM's plugin entry points. vLLM swallows what goes wrong while one is imported, so nothing can here."""


def platform() -> None:
    """``vllm.platform_plugins``: runs early in every process; names no platform."""
    from .plugin import arm

    arm()


def general() -> None:
    """``vllm.general_plugins``: an error from here stops the engine, as it should."""
    from .plugin import arm_late

    arm_late()
