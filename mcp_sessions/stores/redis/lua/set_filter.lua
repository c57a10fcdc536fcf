-- needs: session
-- ARGV: lists, token, then the URIs. The subscriptions that there were, and their tokens.
local ends = redis.call('HGET', base, 'ends')
if not ends then
    return false
end
local uris = base .. ':u'
local before = redis.call('HGETALL', uris)
redis.call('UNLINK', uris)
for i = 3, #ARGV do
    redis.call('HSET', uris, ARGV[i], ARGV[2])
end
share_lifetime(uris)
redis.call('HDEL', base, 'ub')
redis.call('HSET', base, 'lists', ARGV[1], 'uris', ARGV[2])
return { ends == 'inf' and 'for ever' or 'subscribed', before }
