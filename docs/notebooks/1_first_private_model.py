# %% [markdown]
# # A first private model
# A table, three lines, and what they promise. The table is scikit-learn's breast cancer data: 569 people,
# 30 measurements each. That is very little for differential privacy, which the last picture shows.

# %%
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

X, y = load_breast_cancer(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)
X_train.shape

# %% [markdown]
# One argument, the budget. `classes` is public knowledge here; left out, a noisy count would find the classes,
# and take some of the budget.

# %%
from clipless.sklearn import CliplessClassifier

classifier = CliplessClassifier(epsilon=3.0, classes=[0, 1]).fit(X_train, y_train)
print(f"{classifier.score(X_test, y_test):.1%} of the test rows are right")

# %% [markdown]
# What was promised, what it rests on, and what it does not cover:

# %%
print(classifier.privacy_)

# %% [markdown]
# How does the score depend on epsilon? The following trains three more models. On private data all of them would be
# paid for; this table is public, so we may look. The dashed line is what "always the larger class" reaches.

# %%
import warnings

warnings.simplefilter("ignore")  # that many fits were made: said above
classifier.plot_privacy_utility(X_train, y_train, test=(X_test, y_test), epsilons=(0.5, 2, 8))
