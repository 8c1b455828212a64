"""Private image classifiers: scattering features, private standardisation, one linear layer."""

from clipless.images._features import ImageFeatures
from clipless.images._model import build_network, decorrelation
from clipless.images._recipes import RecipeResult, image_config, image_recipes, rule_of, run_recipe
from clipless.images._rule import ImageRule
from clipless.images._run import open_images, resolved_images, train_images_run
from clipless.images._train import TrainedImages, train_images

__all__ = [
    "image_config",
    "train_images",
    "TrainedImages",
    "ImageRule",
    "ImageFeatures",
    "build_network",
    "decorrelation",
    "image_recipes",
    "run_recipe",
    "RecipeResult",
    "open_images",
    "resolved_images",
    "rule_of",
    "train_images_run",
]
