"""The planner: a pure function from a search's specification and trials to the next plan.

The method is Bayesian optimization with a constraint that is learned, bytes within a budget:

1. The baseline runs first (`planner.decide`). While nothing fits, the smallest plan of the variant
   that is most likely to fit runs next.
2. All trials are fitted by two Gaussian processes over variants and micro-batches, of log bytes and
   of log seconds, whose mean is the logarithm of a line over the micro-batch (`lines`). The
   log-coefficients of lines are sums of normal effects of settings and of pairs of settings, and a
   plan departs from its line by a residual that is correlated over sizes. The posterior is exact
   but for the logarithm of a sum, around whose likeliest value it is linear: Laplace's
   approximation (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, section
   3.4). What ran out of memory is a censored reading (`held_bytes`).
3. Faults exclude settings and sizes (`feasibility`). The probability that a plan fits follows from
   the posterior of its bytes (`beliefs`).
4. The plans of an expert run next: a second size, then each precision with all levers on and alone,
   at the largest size that is expected to fit, unless they ran or surely are slower than the
   incumbent (`experts`).
5. Then the candidate of the largest acquisition value runs (`candidates`). That value is the
   probability that the plan fits, as in constrained expected improvement (Gardner et al., Bayesian
   Optimization with Inequality Constraints, ICML 2014), times the sum of its expected improvement
   over the incumbent (Jones, Schonlau and Welch, Efficient Global Optimization of Expensive
   Black-Box Functions, 1998) and of a share of the knowledge gradient: what the probe tells of the
   variant's largest size (Frazier, Powell and Dayanik, A Knowledge-Gradient Policy for Sequential
   Information Collection, 2008). The expected cost of running out of memory is subtracted.
6. The threshold of that value grows with the number of probes. Where no candidate reaches it,
   costly values run beside the fastest plans, by value per second, where they save more over the
   planned training than the probe takes. Where none does, the search ends.
7. The finalists run again in rounds, each of them once a round, in random order (`confirmation`).
   Log ratios within rounds and the best of several replicates decide (`autofit.rounds`); what is
   not told from the baseline with 95% is not recommended.

Plans that are pending are believed to turn out as forecast (`planner.believing`), as in the
kriging believer (Ginsbourger, Le Riche and Carraro, Kriging Is Well-Suited to Parallelize
Optimization, 2010). Every constant stands in `constants`. docs/search.md has the same in full.
"""
