"""The paper's theorems as code: constants, bounds, problems on which both are known, and a simulation that measures.

constants.py    L, rho, sigma_g, ... of a problem, and what the lemmas make of them (L_b, mu_b, ..., gamma_c)
bounds.py       step sizes, conditions on T and right-hand sides of the three theorems, as printed and corrected
problems/       quadratics, logistic regression and smoothed corners, with their constants
simulation.py   Algorithms 1 and 2 for many seeds at once
studies.py      all studies of an option: over_time.py (measured against bound over T and tau), floors.py,
                fedasync_limit.py, uneven_schedule.py; study.py has their settings and what they find
advise.py       step size, smallest T and warnings for a run's constants
"""
