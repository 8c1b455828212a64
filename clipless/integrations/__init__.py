"""Other people's loops: Lightning, Fabric, the Hugging Face Trainer, accelerate, Flower.

Each library is an extra, and is imported when its part is first used.
"""

from typing import TYPE_CHECKING

from clipless.common import lazy_names

if TYPE_CHECKING:
    from clipless.integrations._flower import flower_client_app, train_with_flower
    from clipless.integrations._hugging_face import CliplessTrainer
    from clipless.integrations._lightning import CliplessCallback
    from clipless.integrations._lightning_processes import PrivateStrategy
    from clipless.integrations._plain_loops import prepare_private
    from clipless.integrations._tensor_model import TensorModel

__all__ = [
    "CliplessCallback",
    "PrivateStrategy",
    "CliplessTrainer",
    "TensorModel",
    "prepare_private",
    "flower_client_app",
    "train_with_flower",
]

if not TYPE_CHECKING:
    _EXTRAS = {
        "lightning": "lightning",
        "transformers": "transformers",
        "accelerate": "transformers",
    }
    _find, __dir__ = lazy_names(__name__)

    def __getattr__(name: str) -> object:
        try:
            return _find(name)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in _EXTRAS:
                raise
            raise ImportError(
                f"{name} needs {package}: pip install 'clipless[{_EXTRAS[package]}]'"
            ) from error
