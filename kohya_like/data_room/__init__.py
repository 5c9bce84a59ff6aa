"""The Data tab's side of the studio: a data set as training will see it, its captions, and what may be wrong with its images."""
