-- KEYS: the ends (by time), those that no server wrote to its log yet. ARGV: how many ends are kept,
-- the latest time that is forgotten, milliseconds that the lists are kept, whether the second list
-- gets them too (0 or 1); then time and text of each end. Which of them are new, by their number.
local most, new = tonumber(ARGV[1]), {}
for i = 5, #ARGV, 2 do
    if redis.call('ZADD', KEYS[1], 'NX', ARGV[i], ARGV[i + 1]) == 1 then
        new[#new + 1] = (i - 5) / 2
        if ARGV[4] == '1' then
            redis.call('RPUSH', KEYS[2], ARGV[i + 1])
        end
    end
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[2])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -most - 1)
redis.call('LTRIM', KEYS[2], -most, -1)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return new
