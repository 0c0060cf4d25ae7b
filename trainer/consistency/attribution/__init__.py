"""Why a gap is there: an inquiry by counterfactual, and the shares of each cause."""
