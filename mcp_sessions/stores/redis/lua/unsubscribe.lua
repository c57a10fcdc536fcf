-- needs: session
-- ARGV: uri, token. Whether the session is there, the token of the subscription, and what changed
-- the subscriptions before.
if redis.call('EXISTS', base) == 0 then
    return { 0 }
end
local token = redis.call('HGET', base .. ':u', ARGV[1])
if redis.call('HDEL', base .. ':u', ARGV[1]) == 1 and redis.call('HEXISTS', base, 'ub') == 1 then
    redis.call('HINCRBY', base, 'ub', -#ARGV[1])
end
local before = redis.call('HGET', base, 'uris')
redis.call('HSET', base, 'uris', ARGV[2])
return { 1, token, before }
